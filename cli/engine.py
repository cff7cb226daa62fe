"""Where the commands meet the engine: a test hands `main` another one, and all of them load their pair here."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from dflash_mlx.cli.interrupts import leave_at_once
from dflash_mlx.cli.options import PairOptions
from dflash_mlx.cli.render import Progress, Screen, banner
from dflash_mlx.errors import OptionError
from dflash_mlx.types import Chunk, Completion, Mode

Plan = tuple[Mode, int, str | None]


class Engine(Protocol):
    """The public API's functions that the commands call, as the module dflash_mlx.api has them."""

    @property
    def load(self) -> Callable[..., Any]: ...
    @property
    def plan(self) -> Callable[..., Plan]: ...
    @property
    def generate(self) -> Callable[..., Completion]: ...
    @property
    def stream(self) -> Callable[..., Iterator[Chunk]]: ...
    @property
    def check(self) -> Callable[..., Iterator[Any]]: ...


def load_engine() -> Engine:
    """Import the real engine, which is slow, and only then."""
    with leave_at_once():
        import dflash_mlx.api

    engine: Engine = dflash_mlx.api
    return engine


def open_pair(
    engine: Engine, screen: Screen, options: PairOptions, settings: Mapping[str, Any], *, show: bool
) -> tuple[Any, Plan]:
    """Return the loaded pair, and the mode and block size it will run with.

    Notices always appear on stderr, the start-up line where someone watches or `show` asks for it.
    """
    wanted = {name: settings[name] for name in ("block_size", "block_cap", "speculate") if name in settings}
    with Progress(screen, "loading …") as progress:
        pair = engine.load(**options.given(), speculate=wanted.get("speculate", True), progress=progress)
    plan = engine.plan(pair, **wanted)
    for notice in (*pair.notices, plan[2]):
        screen.note(notice)
    if show or screen.err.isatty():
        screen.line(banner(pair, *plan[:2]))
    return pair, plan


def open_drafted(engine: Engine, screen: Screen, options: PairOptions, settings: Mapping[str, Any]) -> Any:
    """Return a pair for a command that compares with plain decoding; raise OptionError where it would be that."""
    pair, plan = open_pair(engine, screen, options, settings, show=True)
    if plan[0] == "plain":
        raise OptionError("there is nothing to compare with plain decoding; give a draft and a block size above 1")
    return pair
