"""Small models for each thing that a network may do, each trained split and compared with one process."""
