"""Jobs that are slow or wrong for one known reason each, and whether the report names it."""
