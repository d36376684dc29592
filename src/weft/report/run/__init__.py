"""A run as a report: the same tables as plain text, as JSON and as one page of HTML.

`report.py` gathers what there is to say, the tables, `charts.py` and `lanes.py` say it in figures and pictures,
`text.py`, `document.py` and `page.py` write it down.
"""
