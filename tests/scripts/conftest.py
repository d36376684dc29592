"""The scripts are started by the tests, not imported."""

from pathlib import Path

_HERE = Path(__file__).parent
collect_ignore = [
    str(path.relative_to(_HERE)) for path in _HERE.rglob("*.py") if not path.name.startswith("test_")
]
