"""`python -m tests.golden` writes all files anew; read the difference before you commit it."""

from __future__ import annotations

from tests.golden.texts import FOLDER, TEXTS

if __name__ == "__main__":
    for name, make_text in TEXTS.items():
        path = FOLDER / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(make_text(), encoding="utf-8")
