"""A page in headless Chromium, which the network is taken from.

Tests that import this are skipped, and counted, where Chromium or Playwright is missing:
docs/design/tests.md.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip("Chromium is not installed: apt-get install chromium", allow_module_level=True)
playwright = pytest.importorskip(
    "playwright.sync_api", reason="Playwright is not installed: pip install playwright"
)


class Opened:
    """A page, and what it complained of or asked the network for."""

    def __init__(
        self, browser: Any, path: Path, scheme: str = "light", width: int = 1200, scripts: bool = True
    ) -> None:
        self.context = browser.new_context(
            viewport={"width": width, "height": 700},
            color_scheme=scheme,
            offline=True,
            java_script_enabled=scripts,
        )
        self.context.set_default_timeout(30_000)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.route("**/*", lambda route: route.abort() if self.requests[1:] else route.continue_())
        self.page.goto(path.as_uri())
        if scripts:
            self.settle()

    def close(self) -> None:
        """The page asked for nothing but itself and did not complain."""
        assert self.complaints == []
        assert len(self.requests) == 1, f"it asked for more than itself: {self.requests}"
        self.context.close()

    def settle(self) -> None:
        self.page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def view(self) -> dict[str, float]:
        self.settle()
        return self.page.evaluate("weft.view()")

    def press(self, *keys: str) -> None:
        self.page.focus("#canvas")
        for key in keys:
            self.page.keyboard.press(key)
        self.settle()

    def pixels(self) -> str:
        self.settle()
        return self.page.evaluate("document.getElementById('canvas').toDataURL()")

    def colours(self) -> set[str]:
        """All colours on the canvas."""
        return set(
            self.page.evaluate(
                """() => { const c = document.getElementById("canvas");
                const copy = new OffscreenCanvas(c.width, c.height).getContext("2d", {willReadFrequently: true});
                copy.drawImage(c, 0, 0);
                const d = copy.getImageData(0, 0, c.width, c.height).data, found = new Set();
                for (let i = 0; i < d.length; i += 4)
                  found.add("#" + [d[i], d[i + 1], d[i + 2]].map(n => n.toString(16).padStart(2, "0")).join(""));
                return [...found]; }"""
            )
        )

    def said(self) -> str:
        return self.page.text_content("#said")
