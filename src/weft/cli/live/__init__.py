"""What is shown of a job while it runs."""
