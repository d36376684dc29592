"""Views of a job while it runs."""

PAGE = "report.html"
"""The page of a recording, in its folder."""
