"""pull: bring a pair to this machine without loading it."""

from typing import Annotated

import typer

from dflash_mlx.cli.options import PairOptions
from dflash_mlx.cli.render import Progress, Screen


def pull(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="A pair known by name.", show_default=False)
    ] = None,
    *,
    pair: PairOptions,
) -> None:
    """Download a pair. A cut download goes on where it stopped."""
    from dflash_mlx import pairing
    from dflash_mlx.errors import OptionError

    options = pair.given()
    if name is not None:
        if options.get("pair", name) != name:
            raise OptionError("give the pair's name once")
        options["pair"] = name
    if not options:
        raise OptionError("say what to pull: a pair's name (`dflash-mlx models` lists them), or --model and --draft")
    screen = Screen.standard()
    asked = pairing.request(**{"pair": None, "model": None, "draft": None, **options})
    with Progress(screen, "asking …") as progress:
        found = pairing.find(asked)
        missing = sum(part.missing_bytes for part in found.parts)
        found = pairing.fetch(asked.name, found, progress)
    for part in found.parts:
        print(f"{part.name}: {part.folder}")
    screen.line(f"{asked.name} is complete" if missing else f"{asked.name} was complete already")
