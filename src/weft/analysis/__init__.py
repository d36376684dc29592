"""The speed of a recorded run: where each rank's time went, and what would be gained by which change.

Pure: it takes a `Run` and knows neither files nor frameworks.
"""
