"""How a whole job may be divided over machines: what each way costs, which fit, which is the fastest."""
