"""Every kind of fault, at every moment, under every launcher: one table, and what runs it.

table       the faults, the moments and the rows, as data
strike      runs one row and judges it: gone in time, the culprit named, nothing left, the same losses after a restart
hosts       two hosts for jobs that span hosts: two network namespaces, and what can befall the link between them
page        the results as the table of tests/README.md
"""
