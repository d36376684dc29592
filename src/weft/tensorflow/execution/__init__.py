"""A step on one rank: phases as functions of TensorFlow, run in the order of a schedule."""
