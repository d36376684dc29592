"""A plan as a page: what to run, what else there is, what it takes, why not otherwise.

`report.py` is what there is to say, `pictures.py` and `pipeline.py` draw it, `looks.py` says how parts look, `page.py`
writes it down.
"""
