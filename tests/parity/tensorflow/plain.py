"""Predictions of exported models, made without weft: ``python plain.py FOLDER``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

folder = Path(sys.argv[1])
x = np.random.default_rng(100).normal(size=(8, 6)).astype("float32")  # what saves.batch(100) gives
whole, own = (tf.saved_model.load(str(folder / name)) for name in ("whole", "own"))
found = {
    "keras": keras.models.load_model(folder / "whole.keras").predict(x, verbose=0),
    "layer": keras.layers.TFSMLayer(str(folder / "whole"), call_endpoint="serve")(x),
    "own": own.serve(x),
    "saved_model": whole.signatures["serving_default"](tf.constant(x))["output_0"],
}
assert not [name for name in sys.modules if name.split(".")[0] == "weft"]
print(json.dumps({name: np.asarray(value).tolist() for name, value in found.items()}))
