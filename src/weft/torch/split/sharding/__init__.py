"""The parts of a model that ranks can cut, decided with one microbatch: weights, and sequences."""
