"""The public face: load a pair, stream or generate text, check that speculation changes nothing."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypedDict, Unpack

import mlx.core as mx

from dflash_mlx import metal
from dflash_mlx.decode import block_for, decode, room_for
from dflash_mlx.errors import OptionError
from dflash_mlx.loading import Pair, load
from dflash_mlx.lossless import Check, compare
from dflash_mlx.sampling import Sampler
from dflash_mlx.text import Piece, TextStream
from dflash_mlx.types import Chunk, Completion, Cycle, Finish, Mode, Options, Prompt, Sampling, Stats

__all__ = ["Check", "Pair", "check", "generate", "load", "plan", "stream"]


class Settings(TypedDict, total=False):
    """The keyword arguments of `stream` and `generate` that become `Options`; defaults stand there."""

    max_tokens: int
    block_size: int | None
    block_cap: bool
    speculate: bool
    denoise_steps: int
    prefill_chunk: int
    stop: str | Sequence[str]
    sampling: Sampling


@functools.cache
def _default_pair() -> Pair:
    return load()


def _options(settings: Settings) -> Options:
    unknown = settings.keys() - Settings.__annotations__.keys()
    if unknown:
        raise TypeError(f"unknown arguments: {', '.join(sorted(unknown))}")
    stop = settings.get("stop", ())
    if not isinstance(stop, (str, list, tuple)):
        raise OptionError(f"stop must be a text or a list of texts, not {stop!r}")
    return Options(**{**settings, "stop": (stop,) if isinstance(stop, str) else tuple(stop)})  # type: ignore[arg-type]


def stream(
    prompt: Prompt,
    *,
    pair: Pair | None = None,
    system: str | None = None,
    reasoning: str | None = None,
    raw: bool = False,
    **settings: Unpack[Settings],
) -> Iterator[Chunk]:
    """Check everything, then return an iterator over the answer's text as it is verified.

    A prompt is a text (one user message; with `raw` taken as it stands), a list of chat messages, or a list of token
    ids. Without `pair` the default preset is loaded once and kept; without `sampling` decoding is greedy. The last
    chunk carries `finish_reason` and `stats`. Raises OptionError and PromptError before anything is computed.
    """
    options = _options(settings)
    pair = pair or _default_pair()
    ids = pair.tokenizer.encode_prompt(prompt, system=system, reasoning=reasoning, raw=raw)
    size, notice = block_for(pair.target, pair.draft, options)
    room_for(pair.target, ids, options)
    return _stream(pair, ids, options, size, [] if notice is None else [notice])


def generate(
    prompt: Prompt,
    *,
    pair: Pair | None = None,
    system: str | None = None,
    reasoning: str | None = None,
    raw: bool = False,
    **settings: Unpack[Settings],
) -> Completion:
    """Return the whole answer at once; arguments and errors are those of `stream`."""
    return collect(stream(prompt, pair=pair, system=system, reasoning=reasoning, raw=raw, **settings))


def collect(chunks: Iterator[Chunk]) -> Completion:
    """Return a stream's chunks as one Completion."""
    text: dict[str, list[str]] = {"answer": [], "reasoning": []}
    tokens: list[int] = []
    for chunk in chunks:
        text[chunk.kind].append(chunk.text)
        tokens += chunk.tokens
    assert chunk.finish_reason is not None and chunk.stats is not None, "the last chunk carries both"
    return Completion(
        "".join(text["answer"]), "".join(text["reasoning"]), tuple(tokens), chunk.finish_reason, chunk.stats
    )


def plan(pair: Pair, **settings: Unpack[Settings]) -> tuple[Mode, int, str | None]:
    """Return the mode and block size that `stream` would run with, and a notice where they are not as asked."""
    size, notice = block_for(pair.target, pair.draft, _options(settings))
    return _mode(pair, size), size, notice


def check(
    prompts: Sequence[Prompt], *, pair: Pair | None = None, raw: bool = False, **settings: Unpack[Settings]
) -> Iterator[Check]:
    """Yield the lossless verdict of each prompt, decoded greedily with and without the draft."""
    options = replace(_options(settings), sampling=Sampling())
    pair = pair or _default_pair()
    size, _ = block_for(pair.target, pair.draft, options)
    if pair.draft is None or size == 1:
        raise OptionError("a check compares speculative with plain decoding: it needs a draft and a block size above 1")
    for prompt in prompts:
        ids = pair.tokenizer.encode_prompt(prompt, raw=raw)
        yield compare(pair.target, pair.draft, ids, options, pair.stop_ids, size)


def _stream(pair: Pair, ids: list[int], options: Options, size: int, notices: list[str]) -> Iterator[Chunk]:
    sampler = Sampler(options.sampling)
    text = TextStream(pair.tokenizer, stop=options.stop, inside_think=pair.tokenizer.thinks_first(ids))
    cycles: list[Cycle] = []
    finish: Finish = "length"
    mx.reset_peak_memory()
    metal.notify(notices.append)  # a kernel that is switched off now is part of this answer's story
    for cycle in decode(pair.target, pair.draft, ids, options, pair.stop_ids, sampler, size):
        used = text.used
        pieces = text.feed(cycle.tokens)
        cycle = replace(cycle, tokens=cycle.tokens[: text.used - used])
        cycles.append(cycle)
        notices += [cycle.notice] if cycle.notice else []
        yield from _chunks(pieces, cycle)
        finish = "stop" if text.stopped else cycle.finish or finish
        if text.stopped:
            break
    *pieces, last = text.finish() or [Piece("")]
    yield from (Chunk(piece.text, piece.kind) for piece in pieces)
    stats = _stats(pair, sampler, size, len(ids), cycles, notices)
    yield Chunk(last.text, last.kind, finish_reason=finish, stats=stats)


def _chunks(pieces: list[Piece], cycle: Cycle) -> Iterator[Chunk]:
    """Yield a chunk for each piece, the first with the cycle and its tokens, even where no text is complete yet."""
    first, *others = pieces or [Piece("")]
    yield Chunk(first.text, first.kind, cycle.tokens, cycle)
    yield from (Chunk(piece.text, piece.kind) for piece in others)


def _mode(pair: Pair, size: int) -> Mode:
    return "plain" if pair.draft is None or size == 1 else ("dflash", "dflash2")[pair.draft.config.version - 1]


def _stats(
    pair: Pair, sampler: Sampler, size: int, prompt_tokens: int, cycles: list[Cycle], notices: list[str]
) -> Stats:
    prefill, turns = cycles[:1], cycles[1:]
    tokens = sum(len(cycle.tokens) for cycle in cycles)
    later = sum(len(cycle.tokens) for cycle in turns)
    decode_s = sum(cycle.seconds for cycle in turns)
    mode = _mode(pair, size)
    return Stats(
        model=pair.model_id,
        draft=pair.draft_id if mode != "plain" else None,
        revision=pair.revision,
        mode=mode,
        block_size=size,
        seed=sampler.seed,
        prompt_tokens=prompt_tokens,
        completion_tokens=tokens,
        cycles=len(turns),
        drafted=tuple(len(cycle.drafted) for cycle in turns),
        accepted=tuple(cycle.accepted for cycle in turns),
        tau=later / len(turns) if turns else 0.0,
        prefill_s=sum(cycle.seconds for cycle in prefill),
        decode_s=decode_s,
        tokens_per_s=later / decode_s if decode_s else 0.0,
        peak_bytes=mx.get_peak_memory(),
        notices=tuple(notices),
    )
