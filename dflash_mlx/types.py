"""The plain records that cross from engine to screen; nothing here needs mlx."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from dflash_mlx.errors import OptionError

Finish = Literal["stop", "length"]
Mode = Literal["plain", "dflash", "dflash2"]


def _require(ok: bool, name: str, value: object, rule: str) -> None:
    if not ok:
        raise OptionError(f"{name} must be {rule}, not {value!r}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require_int(name: str, value: object, least: int) -> None:
    _require(_is_int(value) and value >= least, name, value, f"a whole number of at least {least}")  # type: ignore[operator]


def _require_float(name: str, value: object, low: float, high: float) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    _require(number and low <= value <= high, name, value, f"between {low:g} and {high:g}")  # type: ignore[operator]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is drawn from logits; temperature 0 is greedy.

    `top_p` 1, `top_k` 0 and `min_p` 0 switch those filters off; without `seed` one is drawn and reported.
    Raises OptionError for a value out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        _require_float("temperature", self.temperature, 0.0, 100.0)
        _require_float("top_p", self.top_p, 0.0, 1.0)
        _require_int("top_k", self.top_k, 0)
        _require_float("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _require_int("seed", self.seed, 0)
            _require(self.seed < 2**64, "seed", self.seed, "below 2**64")


@dataclass(frozen=True, slots=True)
class Options:
    """One generation's settings; `block_size` counts the anchor and None takes the pair's own.

    `speculate=False` and `block_size=1` are plain decoding. `stop` holds texts at which the answer ends.
    Raises OptionError for a value out of range.
    """

    max_tokens: int = 512
    block_size: int | None = None
    block_cap: bool = True
    speculate: bool = True
    denoise_steps: int = 1
    prefill_chunk: int = 2048
    stop: tuple[str, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        _require_int("max_tokens", self.max_tokens, 0)
        if self.block_size is not None:
            _require_int("block_size", self.block_size, 1)
        _require_int("denoise_steps", self.denoise_steps, 1)
        _require_int("prefill_chunk", self.prefill_chunk, 1)
        texts = isinstance(self.stop, tuple) and all(isinstance(text, str) and text for text in self.stop)
        _require(texts, "stop", self.stop, "a tuple of non-empty strings")
        _require(isinstance(self.sampling, Sampling), "sampling", self.sampling, "a Sampling")
        for name in ("block_cap", "speculate"):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")


@dataclass(frozen=True, slots=True)
class Cycle:
    """One turn of the decode loop: the committed token ids, what was drafted, and how much of it was kept.

    Cycle 0 is the prefill: it drafts nothing and commits the first token. `accepted` counts kept proposals, also those
    that a stop or the budget then cut; `seconds` is the wall time, and `notice` one line that the user should see.
    """

    tokens: tuple[int, ...]
    drafted: tuple[int, ...]
    accepted: int
    seconds: float
    finish: Finish | None = None
    notice: str | None = None


@dataclass(frozen=True, slots=True)
class Stats:
    """What one generation did; times in seconds, memory in bytes, `tau` in tokens per cycle (bonus included)."""

    model: str
    draft: str | None
    revision: str | None
    mode: Mode
    block_size: int
    seed: int | None
    prompt_tokens: int
    completion_tokens: int
    cycles: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    tau: float
    prefill_s: float
    decode_s: float
    tokens_per_s: float
    peak_bytes: int
    notices: tuple[str, ...] = ()

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """Share of the cycles that drafted position k (0-based) in which it was kept."""
        reached = Counter(k for n in self.drafted for k in range(n))
        kept = Counter(k for n in self.accepted for k in range(n))
        return tuple(kept[k] / reached[k] for k in sorted(reached))


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of streamed text; `kind` tells the answer from the reasoning before it.

    `stats` is set on the last chunk only, and `finish_reason` with it.
    """

    text: str
    kind: Literal["answer", "reasoning"] = "answer"
    tokens: tuple[int, ...] = ()
    cycle: Cycle | None = None
    finish_reason: Finish | None = None
    stats: Stats | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished generation; `str()` of it is the answer's text, `tokens` are all ids delivered."""

    text: str
    reasoning: str
    tokens: tuple[int, ...]
    finish_reason: Finish
    stats: Stats

    def __str__(self) -> str:
        return self.text


Message = dict[str, Any]
Prompt = str | list[Message] | list[int]
