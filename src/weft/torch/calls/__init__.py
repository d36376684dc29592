"""Calls of modules and functions, seen from outside.

A rank that does not run a call knows its result's shapes by the call's signature. What it has in place of other ranks'
parameters are placeholders.
"""
