"""What each engine wants in order to start a job: commands, batch scripts and manifests.

``described`` is the job and ``plan`` is what is made of it. Every other file is one engine, a pure function from the
one to the other. Nothing is started here.
"""
