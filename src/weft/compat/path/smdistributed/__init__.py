"""The names of the original, made of weft's parts."""
