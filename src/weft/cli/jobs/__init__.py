"""Jobs that run elsewhere, or have ended: what their folders say, and how they are ended.

status, logs, stop: one command each, for the folder that `weft run --log-dir` was given
"""
