"""From a traced model to a plan: which modules are units, where each goes, and by which schedule they run.

trace -> unit_tree -> open_modules: candidates -> automatic: simulated steps -> plan -> placed.apply
"""
