"""Engines: the commands, batch scripts and manifests with which each starts a job.

``described`` is the job and ``plan`` is what is made of it. Every other file is one engine, a pure function from the
one to the other. Nothing is started here.
"""
