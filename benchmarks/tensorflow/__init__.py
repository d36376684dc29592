"""Step times of Keras models, split over two processes, against one process and against TensorFlow's own ways."""
