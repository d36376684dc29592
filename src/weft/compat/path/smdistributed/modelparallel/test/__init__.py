"""Tests that the original offers to scripts."""
