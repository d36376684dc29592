"""Translations between names of states: with nothing split they change nothing."""
