"""Loading a pair on behalf of a command, with all that the user should know before the first token."""

from collections.abc import Mapping
from typing import Any

from dflash_mlx.cli.engine import Engine, Plan
from dflash_mlx.cli.options import PairOptions
from dflash_mlx.cli.render import Progress, Screen, banner
from dflash_mlx.types import Sampling


def open_pair(
    engine: Engine, screen: Screen, options: PairOptions, settings: Mapping[str, Any], *, show: bool = False
) -> tuple[Any, Plan]:
    """Return the loaded pair and how it will run.

    Notices always appear on stderr, the start-up line where someone watches or `show` asks for it.
    """
    wanted = {name: settings[name] for name in ("block_size", "block_cap", "speculate") if name in settings}
    with Progress(screen) as progress:
        pair = engine.load(**options.given(), speculate=wanted.get("speculate", True), progress=progress)
    plan = engine.plan(pair, **wanted)
    for notice in (*pair.notices, plan[2]):
        screen.note(notice)
    if show or screen.err.isatty():
        screen.line(banner(pair, plan))
    return pair, plan


def sampling_for(pair: Any, reasoning: str | None) -> Sampling:
    """Return the pair's own sampling, which differs where reasoning is switched off."""
    found: Sampling = pair.sampling_plain if reasoning == "off" else pair.sampling
    return found
