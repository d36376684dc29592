"""The model as a plan has placed it: what lies on this rank, and what the script changes later."""
