"""The half of the original that is for TensorFlow: importing it is refused."""

from weft.compat.refused import refuse_tensorflow

refuse_tensorflow(__name__)
