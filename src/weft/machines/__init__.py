"""Machines as data: accelerators, hosts, instance types of clouds, and a file format for others."""
