"""Jobs of weft's own launcher: what is to run, and what follows when it fails.

job -> weft.launch.local (one attempt) -> restarts (whether and when the next one)
"""
