"""The `weft` command: one subcommand a file, and `jobs` with those that look at a job."""
