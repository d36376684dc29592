"""The recorded pipeline: what each piece of a step needed, what its stages cost, what it would be otherwise."""
