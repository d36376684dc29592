"""Unmodified model classes of `transformers`, small and random, each with inputs: see `CASES`."""

from __future__ import annotations

from . import audio, decoders, encoders, mixtures, multimodal, seq2seq, variants, vision
from .case import CASES, Case

__all__ = [
    "CASES",
    "Case",
    "audio",
    "decoders",
    "encoders",
    "mixtures",
    "multimodal",
    "seq2seq",
    "variants",
    "vision",
]
