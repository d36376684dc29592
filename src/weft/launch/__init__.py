"""A job: which processes it has, how they find each other, and who ends them."""
