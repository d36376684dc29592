"""Measurements of this machine, where other rooms reckon. measured, where other rooms reckon."""
