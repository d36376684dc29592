"""What is not looked through for doctests: scripts that jobs of TensorFlow run, and all that imports it where it is not
installed; its tests say that they are skipped."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parent

collect_ignore = [
    str(path.relative_to(ROOT))
    for folder in ("tests/unit/tensorflow", "tests/parity/tensorflow")
    for path in (ROOT / folder).rglob("*.py")
    if not path.name.startswith("test_") and path.name != "__init__.py"
]
if importlib.util.find_spec("tensorflow") is None:
    collect_ignore += ["src/weft/tensorflow", "src/weft/compat/tensorflow", "src/weft/compat/stand_ins"]
