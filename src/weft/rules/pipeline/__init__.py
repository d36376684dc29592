"""Rules about a model that is split: bubbles, uneven partitions, messages, microbatches."""
