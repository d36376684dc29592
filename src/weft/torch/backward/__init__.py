"""The work of autograd in a backward pass, and what is taken out of it.

loss -> autograd -> gradients of inputs     at once: an earlier stage waits for them
                 -> gradients of weights    at once, or later, when the schedule says W
"""
