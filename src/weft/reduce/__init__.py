"""Adding up gradients over replicas: buckets, algorithms, compression. It works on flat tensors and knows no module."""
