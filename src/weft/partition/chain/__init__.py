"""Cutting a chain of units exactly: the smallest largest part, under limits on memory and with transfers at cuts."""
