"""A job under watch: what each rank shows of itself, who holds the others up, and what people see of it."""
