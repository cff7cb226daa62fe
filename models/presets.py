"""The pairs known by name, read from presets.toml."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from dflash_mlx.errors import OptionError
from dflash_mlx.types import Sampling

FLAGSHIP, TINY = "flagship", "tiny"


@dataclass(frozen=True, slots=True)
class Preset:
    """A named pair: hub ids (or package folders when `embedded`), pinned commits, bytes of weights, sampling defaults.

    A revision of None follows the default branch; sizes are None where unknown; `draft_bits` is applied at load. A
    model given without a name becomes one too, its draft None for plain decoding.
    """

    name: str
    model: str
    draft: str | None
    summary: str = ""
    sampling: Sampling = Sampling()
    sampling_plain: Sampling = Sampling()
    revision: str | None = None
    draft_revision: str | None = None
    draft_bits: int | None = None
    model_bytes: int | None = None
    draft_bytes: int | None = None
    need_bytes: int | None = None
    embedded: bool = False


def package_folder(name: str) -> Path:
    """Return where an embedded checkpoint such as "tiny/target" lies."""
    return Path(str(files("dflash_mlx.models"))).joinpath(*name.split("/"))


def _preset(name: str, table: Mapping[str, Any]) -> Preset:
    fields = dict(table)
    sampling = Sampling(**fields.pop("sampling"))
    plain = Sampling(**fields.pop("sampling_plain")) if "sampling_plain" in fields else sampling
    return Preset(name=name, sampling=sampling, sampling_plain=plain, **fields)


@cache
def presets() -> dict[str, Preset]:
    """Return every preset by name, in the file's order."""
    text = files("dflash_mlx.models").joinpath("presets.toml").read_text(encoding="utf-8")
    return {name: _preset(name, table) for name, table in tomllib.loads(text).items()}


def preset(name: str) -> Preset:
    """Return one preset; raise OptionError that lists the names for an unknown one."""
    if name not in presets():
        raise OptionError(f"no pair is called {name!r}; known are {', '.join(presets())} (or use --model and --draft)")
    return presets()[name]
