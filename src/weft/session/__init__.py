"""A process's knowledge of its job, whatever framework its model is written in.

A frontend derives its own session from `session.Session` and hands bytes between ranks by the port of `collectives`.
"""
