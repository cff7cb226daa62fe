"""The command tree."""

from typing import Annotated, Any

import typer

from dflash_mlx import __version__
from dflash_mlx.cli.bench import bench
from dflash_mlx.cli.chat import chat
from dflash_mlx.cli.check import check
from dflash_mlx.cli.doctor import doctor
from dflash_mlx.cli.generate import generate
from dflash_mlx.cli.models import models
from dflash_mlx.cli.options import grouped
from dflash_mlx.cli.pull import pull

# Typer carries a click of its own and has no public name for this class.
UsageError: Any = typer.BadParameter.__bases__[0]

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
for command in (generate, chat, bench, check, doctor, models, pull):
    app.command()(grouped(command))


def _version(wanted: bool) -> None:
    if wanted:
        print(f"dflash-mlx {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Lossless speculative decoding with DFlash and DFlash 2 on MLX."""
