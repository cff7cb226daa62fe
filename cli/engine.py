"""The one place where the commands meet the engine; a test hands `main` another one."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

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


Loader = Callable[[], Engine]


def load_engine() -> Engine:
    """Import the real engine, which is slow, and only then."""
    import dflash_mlx.api

    engine: Engine = dflash_mlx.api
    return engine
