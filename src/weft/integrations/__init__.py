"""Other people's training loops with models that weft splits: one module for each library, which imports it."""
