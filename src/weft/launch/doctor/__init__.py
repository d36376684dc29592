"""Checks of hosts before a job is started there.

facts      what a host says of itself, as JSON: names, addresses, versions, clock, memory, limits, GPUs
stream     how fast one host sends to another one
remote     both on other hosts, through ssh
advice     findings out of the facts, each with its remedy. Pure
"""
