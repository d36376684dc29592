"""What this machine gives: measured, where other rooms reckon."""
