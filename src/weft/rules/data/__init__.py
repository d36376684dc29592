"""Rules about the way of the data: loaders, preprocessing, storage."""
