"""Data-parallel replicas: averages over them, and values that the first one hands to all."""
