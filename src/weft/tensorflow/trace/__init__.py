"""One microbatch of a step, traced into a graph of operations, and what each operation takes."""
