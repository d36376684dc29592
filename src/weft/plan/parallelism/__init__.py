"""Ways to divide a whole job over machines: what each costs, which fit, which is the fastest."""
