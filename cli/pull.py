"""pull: bring a pair to this machine without loading it."""

from typing import Annotated

import typer

from dflash_mlx.cli.options import PairOptions
from dflash_mlx.cli.render import Progress, Screen, size
from dflash_mlx.errors import OptionError


def pull(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="A pair known by name.", show_default=False)
    ] = None,
    *,
    pair: PairOptions,
) -> None:
    """Download a pair. A cut download goes on where it stopped."""
    from dflash_mlx import catalogue

    options = pair.given()
    options.pop("draft_bits", None)  # a matter of loading
    if name is not None and options.setdefault("pair", name) != name:
        raise OptionError("give the pair's name once")
    if not options:
        raise OptionError("say what to pull: a pair's name (`dflash-mlx models` lists them), or --model and --draft")
    with Progress(Screen.standard(), "asking …") as progress:
        parts = catalogue.pull(**options, progress=progress)
    for part in parts:
        print(f"{part.name}: {size(part.disk_bytes)} in {part.folder}")
