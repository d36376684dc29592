"""What is told of a job while it runs, from the recording that it writes."""
