"""Plain against speculative decoding: warm-up, alternating runs, medians, and the ratio."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from dflash_mlx.types import Completion, Sampling

WARM_UP_TOKENS = 8
Generate = Callable[..., Completion]


@dataclass(frozen=True, slots=True)
class Result:
    """One prompt at one sampling: median tokens per second of both ways, their ratio, and tau.

    `equal` says whether both gave the same tokens, which only greedy decoding promises; None at a temperature.
    """

    prompt: str
    temperature: float
    tokens: int
    plain_tokens_per_s: float
    tokens_per_s: float
    tau: float
    equal: bool | None

    @property
    def ratio(self) -> float:
        """How many times faster than plain decoding; 0 where plain decoding was too short to time."""
        return self.tokens_per_s / self.plain_tokens_per_s if self.plain_tokens_per_s else 0.0


def samplings(default: Sampling) -> tuple[Sampling, ...]:
    """Return greedy and, where it differs, the pair's own sampling with a fixed seed."""
    greedy = Sampling()
    own = replace(default, seed=0)
    return (greedy,) if own.temperature == 0 else (greedy, own)


def compare(
    generate: Generate, prompts: Sequence[str], sampling: Sequence[Sampling], *, repeats: int = 3, **settings: Any
) -> Iterator[Result]:
    """Yield a result for each sampling and prompt; `settings` go to `generate` as they are.

    Both ways alternate within a repeat, so that a machine that slows down slows both.
    """
    for speculate in (False, True):
        generate(prompts[0], speculate=speculate, **settings | {"max_tokens": WARM_UP_TOKENS})
    for one in sampling:
        for prompt in prompts:
            runs: dict[bool, list[Completion]] = {False: [], True: []}
            for _ in range(repeats):
                for speculate in runs:
                    runs[speculate].append(generate(prompt, speculate=speculate, sampling=one, **settings))
            yield _result(prompt, one, plain=runs[False], fast=runs[True])


def _result(prompt: str, sampling: Sampling, plain: Sequence[Completion], fast: Sequence[Completion]) -> Result:
    return Result(
        prompt=prompt,
        temperature=sampling.temperature,
        tokens=fast[0].stats.completion_tokens,
        plain_tokens_per_s=median(run.stats.tokens_per_s for run in plain),
        tokens_per_s=median(run.stats.tokens_per_s for run in fast),
        tau=median(run.stats.tau for run in fast),
        equal=plain[0].tokens == fast[0].tokens if sampling.temperature == 0 else None,
    )
