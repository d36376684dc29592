"""Choices that a running job makes from what it has measured itself, and what its steps say of them afterwards."""
