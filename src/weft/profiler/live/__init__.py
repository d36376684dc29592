"""Views of a job while it runs, from the recording that it writes."""
