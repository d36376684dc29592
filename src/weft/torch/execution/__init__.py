r"""Placed execution: one microbatch's program on one rank.

    step's function -> glue -> program: who has it, who runs it -> unit_call: this rank runs the module, or waits
                                       \-> tape: what was sent, received and kept, for the backward pass

Every rank runs the same program. It computes what is its own, and has placeholders for the rest.
"""
