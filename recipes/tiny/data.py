"""Token files as windows on a device."""

from pathlib import Path

import numpy as np
import torch
from shapes import END_OF_TEXT, ID_BITS, SAID, WINDOW
from torch import Tensor


def load_rows(path: Path) -> list[np.ndarray]:
    """The rows of a file written by `prepare.pack`."""
    with np.load(path) as file:
        return np.split(file["flat"], np.cumsum(file["lengths"])[:-1])


def fill(lengths: np.ndarray, width: int) -> list[list[int]]:
    """Which rows share a window: always the longest one left that still fits."""
    shelves: dict[int, list[int]] = {}
    for i, n in enumerate(lengths):
        shelves.setdefault(int(n), []).append(i)
    bins = []
    sizes = sorted(shelves)
    while sizes:
        room, members = width, []
        while (at := int(np.searchsorted(sizes, room, "right")) - 1) >= 0:
            size = sizes[at]
            members.append(shelves[size].pop())
            room -= size
            if not shelves[size]:
                sizes.pop(at)
        bins.append(members)
    return bins


class Windows:
    """Chats packed into rows of `width` tokens: ids, place in the chat, whether an assistant said it, and its row.

    Padding is END_OF_TEXT; it counts as chats of its own that nobody said.
    """

    def __init__(self, rows: list[np.ndarray], device: str, width: int = WINDOW) -> None:
        bins = fill(np.array([len(r) for r in rows]), width)
        tokens = np.full((len(bins), width), END_OF_TEXT, np.int16)
        index = np.zeros((len(bins), width), np.int16)
        said = np.zeros((len(bins), width), bool)
        owner = np.zeros((len(bins), width), np.int64)
        for line, members in enumerate(bins):
            at = 0
            for i in members:
                row, end = rows[i], at + len(rows[i])
                tokens[line, at:end], said[line, at:end] = row & ID_BITS, (row & SAID) > 0
                index[line, at:end], owner[line, at:end] = np.arange(len(row)), i
                at = end
        self.tokens, self.index, self.said = (torch.from_numpy(x).to(device) for x in (tokens, index, said))
        self.owner = torch.from_numpy(owner).to(device)

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, lines: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Ids and places (B, width) int64, said (B, width) bool."""
        return self.tokens[lines].long(), self.index[lines].long(), self.said[lines]


def batches(count: int, size: int, seed: int, device: str):  # type: ignore[no-untyped-def]
    """Endless line numbers, reshuffled each epoch; the last incomplete batch of an epoch is left out."""
    generator = torch.Generator().manual_seed(seed)
    size = min(size, count)
    while True:
        order = torch.randperm(count, generator=generator).to(device)
        yield from (order[i : i + size] for i in range(0, count - size + 1, size))
