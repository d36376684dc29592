"""Measures of a host while a job runs: twice a second, by a process of its own."""
