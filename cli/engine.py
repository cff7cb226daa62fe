"""The one place where the commands meet the engine; a test hands `main` another one."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from dflash_mlx.types import Chunk, Completion, Mode, Prompt


class Engine(Protocol):
    """What the commands call: the public API's functions, as the module dflash_mlx.api has them."""

    def load(self, pair: str | None = None, **options: Any) -> Any:
        """Return a loaded Pair."""

    def plan(self, pair: Any, **options: Any) -> tuple[Mode, int, str | None]:
        """Return the mode and block size that a generation would run with, and a notice where they are not as asked."""

    def generate(self, prompt: Prompt, **options: Any) -> Completion:
        """Return a finished generation."""

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[Chunk]:
        """Yield a generation as it is verified."""

    def check(self, prompts: Sequence[Prompt], **options: Any) -> Sequence[Any]:
        """Return a Check for each prompt."""


Loader = Callable[[], Engine]


def load_engine() -> Engine:
    """Import the real engine, which is slow, and only then."""
    import dflash_mlx.api

    engine: Engine = dflash_mlx.api
    return engine
