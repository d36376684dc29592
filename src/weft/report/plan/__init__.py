"""A plan as a page: what to run, what else there is, what it takes, why not otherwise.

`pictures.py` and `pipeline.py` draw what there is to say, `page.py` writes it down.
"""
