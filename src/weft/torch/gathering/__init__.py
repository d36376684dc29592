"""Parameters that are on the device, and whole, only while a layer runs that uses them.

Where they come from is somebody else's: from the replicas that share them (``replicas.sharding.by_unit``), or from host
memory (``host_weights``).
"""
