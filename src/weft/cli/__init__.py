"""The `weft` command: one subcommand a file."""
