"""What a host does while a job runs: measured twice a second by a process of its own."""
