"""All drawing: answers on stdout, reasoning apart from them, everything else as single lines on stderr."""

import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from dflash_mlx.types import Chunk, Finish, Mode, Stats

# A model may emit escape codes; on a terminal they would move the cursor or worse.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
LEAST_COLUMN = 24  # characters that the last column of a table keeps at least
DIM, RESET = "\x1b[2m", "\x1b[0m"


def is_dumb() -> bool:
    """Tell whether the user's environment asks for no colours."""
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


@dataclass
class Answer:
    """What has arrived of one answer."""

    text: str = ""
    reasoning: str = ""
    tokens: tuple[int, ...] = ()
    finish_reason: Finish | None = None
    stats: Stats | None = None

    def add(self, chunk: Chunk) -> None:
        """Take in one chunk."""
        self.text += chunk.text if chunk.kind == "answer" else ""
        self.reasoning += chunk.text if chunk.kind == "reasoning" else ""
        self.tokens += chunk.tokens
        self.finish_reason, self.stats = chunk.finish_reason, chunk.stats


class Screen:
    """Where a command draws: `out` takes the answer, `err` all else, and neither breaks into a line of the other."""

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self.out, self.err, self.live = out, err, out.isatty()
        self.colour = self.live and not is_dumb()
        self._kind: str | None = None
        self._half: TextIO | None = None  # the stream whose last line is not complete
        self._noted: set[str] = set()

    @classmethod
    def standard(cls) -> "Screen":
        """Return the screen over this process's stdout and stderr."""
        return cls(sys.stdout, sys.stderr)

    @property
    def width(self) -> int:
        """Columns of the terminal; a pipe takes lines of any length."""
        return shutil.get_terminal_size().columns if self.live else 10_000

    def line(self, text: str) -> None:
        """Print one line on stderr."""
        print(text, file=self.err, flush=True)

    def note(self, text: str | None) -> None:
        """Print a notice once."""
        if text and text not in self._noted:
            self._noted.add(text)
            self.line(f"note: {text}")

    def draw(self, chunks: Iterator[Chunk], answer: Answer) -> None:
        """Show an answer as it arrives, and keep it in `answer`; whatever happens, the cursor ends on a new line."""
        try:
            for chunk in chunks:
                answer.add(chunk)
                if chunk.text:
                    self._become(chunk.kind)
                    self._write(chunk.text)
        finally:
            self._become(None)
            self._close_line()
        for notice in answer.stats.notices if answer.stats else ():  # not amid the answer, which may go to a file
            self.note(notice)

    def report(self, answer: Answer, max_tokens: int, figures: bool) -> None:
        """Say after an answer why it was cut off, if it was, and its figures if they are wanted."""
        count = len(answer.tokens)
        if answer.finish_reason == "length":
            why = "see --max-tokens" if count >= max_tokens else "the context is full (in a chat, /reset starts over)"
            self.line(f"note: cut off after {counted(count, 'token')}, {why}")
        if figures and answer.stats:
            self.line(stats_line(answer.stats, answer.finish_reason))

    def _become(self, kind: str | None) -> None:
        """Set reasoning apart: dim where colours are welcome, between marks on a plain terminal, else on stderr."""
        before, self._kind = self._kind, kind
        if kind == before:
            return
        opening, closing, between = (DIM, RESET, "\n") if self.colour else ("[reasoning]\n", "", "[answer]\n")
        if before == "reasoning":
            self.out.write(closing if self.live else "")
            self._close_line()
        mark = opening if kind == "reasoning" else between if before and kind else ""
        self.out.write(mark if self.live else "")

    def _write(self, text: str) -> None:
        stream = self.out if self.live or self._kind == "answer" else self.err
        text = _CONTROL.sub("", text) if self.live else text
        self._half = None if text.endswith("\n") else stream  # first, as an interrupt may fall in between
        stream.write(text)
        stream.flush()

    def _close_line(self) -> None:
        if self._half is not None:
            print(file=self._half, flush=True)
            self._half = None


class Progress:
    """Loading and downloads, as one line that rewrites itself on a terminal, else a line where a download begins."""

    def __init__(self, screen: Screen, begin: str) -> None:
        self.err, self.begin = screen.err, begin
        self.live = self.err.isatty() and not is_dumb()
        self._begun: set[str] = set()
        self._next = 0.0

    def __enter__(self) -> "Progress":
        self._show(self.begin)
        return self

    def __exit__(self, *_: object) -> None:
        self._show("")

    def __call__(self, name: str, done: int, total: int) -> None:
        """Show that `done` of `total` bytes of checkpoint `name` are here; called from several threads in turn."""
        if not self.live and name not in self._begun:
            print(f"downloading {name} ({size(total)})", file=self.err, flush=True)
        self._begun.add(name)
        if time.monotonic() >= self._next or done == total:
            self._next = time.monotonic() + 0.1
            self._show(f"{name}: {size(done)} of {size(total)} ({done / max(total, 1):.0%})")

    def _show(self, text: str) -> None:
        if self.live:
            self.err.write("\r\x1b[K" + text[: shutil.get_terminal_size().columns - 1])
            self.err.flush()


def banner(pair: Any, mode: Mode, block_size: int) -> str:
    """Return the start-up line: the pair, and how it will run."""
    used = [pair.model_id] if mode == "plain" else [pair.model_id, pair.draft_id]
    names = " + ".join(Path(name).name if Path(name).expanduser().is_dir() else name for name in used)
    how = "plain decoding" if mode == "plain" else f"{mode}, block {block_size}"
    return f"{names} · {how}" if pair.name == pair.model_id else f"{pair.name}: {names} · {how}"


def counted(count: int, noun: str) -> str:
    """Return "1 token" or "2 tokens"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def stats_line(stats: Stats, finish: Finish | None) -> str:
    """Return one answer's figures in a line."""
    plain = stats.mode == "plain"
    facts = (
        f"{stats.completion_tokens} tokens in {stats.decode_s:.2f} s ({stats.tokens_per_s:.1f} tokens/s)",
        f"prompt {stats.prompt_tokens} in {stats.prefill_s:.2f} s",
        "plain" if plain else f"tau {stats.tau:.2f} in {stats.cycles} cycles · {stats.mode}, block {stats.block_size}",
        f"seed {stats.seed}" if stats.seed is not None else "",
        f"peak {size(stats.peak_bytes)}",
        f"ended by {finish}" if finish else "",
    )
    return " · ".join(filter(None, facts))


def size(count: int) -> str:
    """Return bytes as MB or GB of a million or a thousand million."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def table(rows: Sequence[Sequence[str]], width: int) -> str:
    """Return rows in columns, the last one cut to `width`; where even that is too narrow, cells below each other."""
    spans = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    room = width - sum(spans[:-1]) - 2 * len(spans[:-1])
    if room >= min(spans[-1], LEAST_COLUMN):
        cut = [[*row[:-1], row[-1] if len(row[-1]) <= room else row[-1][: room - 1] + "…"] for row in rows]
        return "\n".join("  ".join(map(str.ljust, row, spans)).rstrip() for row in cut)
    head, *body = rows
    label = max(map(len, head))
    blocks = [[f"{name.ljust(label)}  {cell}" for name, cell in zip(head, row, strict=True) if cell] for row in body]
    return "\n\n".join("\n".join(block) for block in blocks)
