"""From the operations of a step to units, from units to partitions, and from partitions to phases."""
