"""Python objects and tensors between ranks, between steps.

objects      the calls: send, recv_from, broadcast, allgather, barrier
handshake    how two ranks of a call find out that they mean the same, before anything is taken
"""
