"""The decode loop: one `Cycle` a turn, from prompt ids to committed ids. It knows nothing of text."""

import time
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet

import mlx.core as mx

from dflash_mlx.acceptance import Draft
from dflash_mlx.drafter import Drafter
from dflash_mlx.errors import OptionError, PromptError
from dflash_mlx.models import DraftNet, Target
from dflash_mlx.processors import Processor
from dflash_mlx.sampling import Sampler
from dflash_mlx.types import Cycle, Finish, Options
from dflash_mlx.verifier import Verifier, host_ids

BLOCK_CAP = 5  # with weights of 4 bits or fewer, wider blocks cost more than they bring
TRIAL_CYCLES, TRIAL_TAU = 32, 1.05  # a draft that yields less than this over its first cycles is given up
CLEAR_EVERY = 256  # tokens between releases of cached buffers


def block_for(target: Target, net: DraftNet | None, options: Options) -> tuple[int, str | None]:
    """Return the block size to run with (1 is plain decoding) and a notice where it is not the one asked for."""
    if not options.speculate or options.block_size == 1:
        return 1, None
    if net is None:
        if options.block_size is not None:
            raise OptionError(f"block_size {options.block_size} needs a draft, and none is loaded")
        return 1, None
    size = options.block_size or net.config.block_size
    bits = target.config.bits
    if not options.block_cap or bits is None or bits > 4 or size <= BLOCK_CAP:
        return size, None
    asked = options.block_size is not None
    note = f"block size {size} lowered to {BLOCK_CAP}: the target's weights have {bits} bits (--no-block-cap lifts it)"
    return BLOCK_CAP, note if asked else None


class Speculation:
    """The drafting side of one generation: its context, its next draft, and whether it is parked."""

    def __init__(self, net: DraftNet, target: Target, sampler: Sampler, block_size: int, denoise_steps: int) -> None:
        self.drafter, self.sampler = Drafter(net, target), sampler
        self.block_size, self.denoise_steps = block_size, denoise_steps
        self.context = net.new_context()
        self.parked = False
        self._cycles = self._emitted = 0

    def absorb(self, features: mx.array, last: int) -> None:
        """Take in the features of committed rows; `last` is the lowest position that will still ask for them."""
        self.drafter.absorb(features, self.context, last)
        mx.async_eval(self.context.arrays())  # or a long prompt's features would all be held until the first draft

    def propose(self, anchor: int, room: int) -> Draft | None:
        """Queue the next draft, of at most `room` proposals, without waiting for it; None when parked."""
        if self.parked:
            return None
        width = min(self.block_size - 1, room)
        draft = self.drafter.propose(anchor, width, self.context, self.sampler, self.denoise_steps)
        mx.async_eval([array for array in draft if array is not None], self.context.arrays())
        return draft

    def judge(self, emitted: int) -> str | None:
        """Count a cycle; park and return why when the first cycles show that the draft proposes nothing useful."""
        self._cycles += 1
        self._emitted += emitted
        if self._cycles != TRIAL_CYCLES or self._emitted >= TRIAL_TAU * TRIAL_CYCLES:
            return None
        self.parked = True
        got = f"{self._emitted} tokens in {self._cycles} cycles"
        return f"draft parked after {got}: it may not belong to this target"


class Run:
    """One generation's moving parts: the target's state, the verifier that advances it, and the draft if one is used.

    `processors` are this generation's own; they hear of every committed token.
    """

    def __init__(
        self, target: Target, net: DraftNet | None, sampler: Sampler, block_size: int, denoise_steps: int = 1,
        processors: Sequence[Processor] = (),
    ) -> None:  # fmt: skip
        drafts = net is not None and block_size > 1
        self.spec = Speculation(net, target, sampler, block_size, denoise_steps) if net and drafts else None
        self.verifier = Verifier(target, sampler, net.config.taps if net and drafts else (), processors)
        self.state = target.new_state()

    def prefill(self, prompt: Sequence[int], chunk: int) -> list[int]:
        """Take in the prompt and return the first token."""
        for processor in self.verifier.processors:
            processor.begin(prompt)
        for last_row, features in self.verifier.prefill(prompt, self.state, chunk):  # noqa: B007 - the last one is used
            if self.spec and features is not None:
                self.spec.absorb(features, last=len(prompt))
        return host_ids(self.verifier.first(last_row))

    def propose(self, anchor: int, room: int) -> Draft | None:
        """Queue the next draft, of at most `room` proposals; None for a plain cycle."""
        return self.spec.propose(anchor, room) if self.spec else None

    def settle(self, tokens: Sequence[int], features: mx.array | None, length: int) -> str | None:
        """Keep `length` rows, the last of them before the last of these emitted tokens; return what to tell the user.

        `features` are those of the verified rows, of which the first `len(tokens)` are kept.
        """
        self.state.keep(length)
        if not self.spec or features is None or self.spec.parked:
            return None
        self.spec.absorb(features[:, : len(tokens)], last=length)
        return self.spec.judge(len(tokens))


def decode(
    target: Target, net: DraftNet | None, prompt: Sequence[int], options: Options, stop_ids: AbstractSet[int],
    sampler: Sampler, block_size: int, processors: Sequence[Processor] = (),
) -> Iterator[Cycle]:  # fmt: skip
    """Yield the prefill's cycle and then one cycle a turn, until a stop id, `max_tokens` or the context's end.

    At every yield the target's state holds `len(prompt) + emitted - 1` rows, and the `processors`, which are this
    generation's own, have heard of every emitted token. Raises PromptError for a prompt that is empty or too long.
    """
    room = room_for(target, prompt, options)
    if room == 0:
        return
    clock = time.perf_counter()
    run = Run(target, net, sampler, block_size, options.denoise_steps, processors)
    tokens, finish = _clip(run.prefill(prompt, options.prefill_chunk), room, stop_ids)
    drafted: tuple[int, ...] = ()
    emitted, accepted, notice = 1, 0, None
    while True:
        run.verifier.commit(tokens)
        draft = run.propose(tokens[-1], room - emitted) if finish is None else None
        yield Cycle(tuple(tokens), drafted, accepted, time.perf_counter() - clock, finish, notice)
        if finish is not None:
            return
        clock = time.perf_counter()
        drafted, accepted, bonus, features = run.verifier.check(tokens[-1], draft, run.state)
        tokens, finish = _clip([*drafted[:accepted], bonus], room - emitted, stop_ids)
        emitted += len(tokens)
        notice = run.settle(tokens, features, len(prompt) + emitted - 1)
        if emitted // CLEAR_EVERY != (emitted - len(tokens)) // CLEAR_EVERY:
            mx.clear_cache()


def room_for(target: Target, prompt: Sequence[int], options: Options) -> int:
    """Return how many tokens may be emitted; raise PromptError for a prompt that is empty or too long."""
    limit = target.config.context_length
    if not prompt:
        raise PromptError("the prompt is empty; give at least one token")
    if len(prompt) >= limit:
        raise PromptError(f"the prompt has {len(prompt)} tokens and the model's context {limit}; shorten it")
    return min(options.max_tokens, limit - len(prompt))


def _clip(tokens: list[int], room: int, stop_ids: AbstractSet[int]) -> tuple[list[int], Finish | None]:
    """Cut tokens after the first stop id and at `room`, and say what ended them; a stop id wins over a spent room."""
    stop = next((i for i, token in enumerate(tokens[:room]) if token in stop_ids), None)
    if stop is not None:
        return tokens[: stop + 1], "stop"
    return tokens[:room], "length" if len(tokens) >= room else None
