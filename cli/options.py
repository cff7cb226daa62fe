"""The options that commands share, as groups: a dataclass field is an option, and a command takes whole groups."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from dflash_mlx.types import Options, Sampling


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Let Typer see each field of a command's dataclass parameters as an option of its own."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    shown: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name not in groups:
            shown.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        types = get_type_hints(groups[name], include_extras=True)
        shown += [
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=types[f.name])
            for f in fields(groups[name])
        ]

    @wraps(command)
    def run(**values: Any) -> None:
        made = {name: kind(**{f.name: values.pop(f.name) for f in fields(kind)}) for name, kind in groups.items()}
        command(**values, **made)

    run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return run


@dataclass(frozen=True)
class PairOptions:
    """Which target and draft to load."""

    pair: Annotated[str | None, typer.Option(metavar="NAME", help="A pair known by name; see `dflash-mlx models`.")] = (
        None
    )
    model: Annotated[str | None, typer.Option(metavar="PATH|ID", help="A target: a folder or a hub id.")] = None
    draft: Annotated[str | None, typer.Option(metavar="PATH|ID", help="The draft that belongs to it.")] = None
    revision: Annotated[str | None, typer.Option(metavar="COMMIT", help="Revision of the target on the hub.")] = None
    draft_revision: Annotated[str | None, typer.Option(metavar="COMMIT", help="Revision of the draft on the hub.")] = (
        None
    )
    draft_bits: Annotated[int | None, typer.Option(metavar="4|8", help="Quantize the draft while loading.")] = None

    def given(self) -> dict[str, Any]:
        """Return the options as arguments of `load`, as far as they were given."""
        named = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in named.items() if value is not None}


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are drawn; what is not given comes from the pair."""

    temperature: Annotated[float | None, typer.Option(metavar="T", help="0 is greedy; the pair has its own.")] = None
    top_p: Annotated[float | None, typer.Option(metavar="P", help="Keep the likeliest tokens up to this share.")] = None
    top_k: Annotated[int | None, typer.Option(metavar="K", help="Keep the K likeliest tokens; 0 keeps all.")] = None
    min_p: Annotated[float | None, typer.Option(metavar="P", help="Drop tokens below this share of the likeliest.")] = (
        None
    )
    seed: Annotated[int | None, typer.Option(metavar="N", help="Draw the same answer again.")] = None

    def over(self, base: Sampling) -> Sampling:
        """Return `base` with the given values put over it; raise OptionError for one out of range."""
        named = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(base, **{name: value for name, value in named.items() if value is not None})


@dataclass(frozen=True)
class DecodingOptions:
    """How far and how wide to decode."""

    max_tokens: Annotated[int, typer.Option(metavar="N", help="End the answer after N tokens.")] = 2048
    block_size: Annotated[int | None, typer.Option(metavar="N", help="Tokens per verify, anchor included.")] = None
    no_block_cap: Annotated[bool, typer.Option("--no-block-cap", help="Allow wide blocks with a 4-bit target.")] = False
    denoise_steps: Annotated[int, typer.Option(metavar="N", help="Draft passes over a block.")] = 1

    def settings(self) -> dict[str, Any]:
        """Return the options as arguments of `generate`; raise OptionError for a value out of range."""
        named: dict[str, Any] = {
            "max_tokens": self.max_tokens,
            "block_size": self.block_size,
            "block_cap": not self.no_block_cap,
            "denoise_steps": self.denoise_steps,
        }
        Options(**named)
        return named


@dataclass(frozen=True)
class BriefDecodingOptions(DecodingOptions):
    """The same for commands that decode each prompt several times."""

    max_tokens: Annotated[int, typer.Option(metavar="N", help="End each answer after N tokens.")] = 128


@dataclass(frozen=True)
class TextOptions:
    """What goes around the prompt and ends the answer."""

    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message.")] = None
    reasoning: Annotated[str | None, typer.Option(metavar="LEVEL", help="off, low, medium or xhigh.")] = None
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End the answer before this text; repeatable.")
    ] = None

    def settings(self) -> dict[str, Any]:
        """Return the options as arguments of `generate`; raise OptionError for a value out of range."""
        stop = tuple(self.stop or ())
        Options(stop=stop)
        return {"system": self.system, "reasoning": self.reasoning, "stop": stop}


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
ShowStats = Annotated[bool, typer.Option("--stats", help="Print speed and acceptance on stderr.")]
NoDraft = Annotated[bool, typer.Option("--no-draft", help="Plain decoding, without the draft.")]
Files = Annotated[
    list[Path] | None, typer.Option("--file", metavar="PATH", help="Put a file before the prompt; repeatable.")
]
