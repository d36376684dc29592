"""Other people's trainers with weft: one module for each, which imports that library."""
