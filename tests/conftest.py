"""What all tests have in common."""

from __future__ import annotations

import hypothesis

from tests import gpus

gpus.hide()

# A machine that does other things too may take long over one example, and no test asserts a time.
hypothesis.settings.register_profile("weft", deadline=None)
hypothesis.settings.load_profile("weft")
