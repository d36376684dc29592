"""Where TensorFlow is not installed, the modules that import it have no doctests to run."""

from __future__ import annotations

import importlib.util

collect_ignore = (
    [] if importlib.util.find_spec("tensorflow") else ["src/weft/tensorflow", "src/weft/compat/tensorflow"]
)
