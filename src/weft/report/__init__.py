"""Findings to pages: tables and pictures."""
