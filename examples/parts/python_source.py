"""Real text that every Python installation has: the source of its own standard library, as numbers."""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

PIECE = re.compile(r"\n *|[A-Za-z]+|[0-9]| +|__|.", re.DOTALL)
"""A line's end with the next line's indent, a word, a digit, spaces, or one other character."""
FOLDERS = ("", "asyncio", "email", "http", "importlib", "json", "logging", "unittest", "urllib", "xml/dom")


def read_source(limit_bytes: int) -> str:
    """Files of the standard library, those that are UTF-8, in an order that is the same everywhere."""
    texts, size = [], 0
    root = Path(sysconfig.get_path("stdlib"))
    for path in (file for folder in FOLDERS for file in sorted((root / folder).glob("*.py"))):
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue
        size += len(texts[-1])
        if size >= limit_bytes:
            break
    return "\n".join(texts)


class Vocabulary:
    """The text's most frequent pieces, and single bytes for whatever is not among them."""

    def __init__(self, text: str, size: int = 4096) -> None:
        counts = Counter(PIECE.findall(text))
        frequent = sorted(counts, key=lambda piece: (-counts[piece], piece))[: size - 256]
        self.words = [bytes([value]) for value in range(256)] + [piece.encode() for piece in frequent]
        self.ids = {piece: 256 + index for index, piece in enumerate(frequent)}

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in PIECE.findall(text):
            known = self.ids.get(piece)
            ids += piece.encode() if known is None else [known]
        return ids

    def decode(self, ids: list[int]) -> str:
        return b"".join(self.words[index] for index in ids).decode(errors="replace")


class Batches:
    """Random pieces of a text of ids; every rank draws the same ones, since the seed is the same."""

    def __init__(self, ids: Tensor, batch: int, length: int, seed: int) -> None:
        self.ids, self.batch, self.length = ids, batch, length
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(self.ids) - self.length, (self.batch,), generator=self.generator)
        rows = torch.stack([self.ids[start : start + self.length + 1] for start in starts.tolist()])
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
