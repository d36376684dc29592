"""Jobs of weft's own launcher: what is to run, and what follows when it fails.

job -> weft.launch.local (one attempt) -> again (the next one), by what restarts decides
"""
