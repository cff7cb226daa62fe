"""The options that commands share, as groups: a dataclass field is an option, and a command takes whole groups."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from dflash_mlx.types import Options, Sampling


def option(metavar: str, text: str, default: Any = None) -> Any:
    """Return a field that is an option with a value."""
    return field(default=default, metadata={"typer": typer.Option(default, metavar=metavar, help=text)})


def flag(name: str, text: str) -> Any:
    """Return a field that is a switch called `name`."""
    return field(default=False, metadata={"typer": typer.Option(False, name, help=text)})


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Let Typer see each field of a command's dataclass parameters as an option of its own."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    shown = [
        parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(command).parameters.items()
        if name not in groups
    ]
    for one in (one for kind in groups.values() for one in fields(kind)):
        more = {"default": one.metadata["typer"], "annotation": one.type}
        shown.append(inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, **more))

    @wraps(command)
    def run(**values: Any) -> None:
        made = {name: kind(**{one.name: values.pop(one.name) for one in fields(kind)}) for name, kind in groups.items()}
        command(**values, **made)

    run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return run


class _Given:
    def given(self) -> dict[str, Any]:
        """Return the options that were given, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class PairOptions(_Given):
    """Which target and draft to load."""

    pair: str | None = option("NAME", "A pair known by name; see `dflash-mlx models`.")
    model: str | None = option("PATH|ID", "A target: a folder or a hub id.")
    draft: str | None = option("PATH|ID", "The draft that belongs to it.")
    revision: str | None = option("COMMIT", "Revision of the target on the hub.")
    draft_revision: str | None = option("COMMIT", "Revision of the draft on the hub.")
    draft_bits: int | None = option("4|8", "Quantize the draft while loading.")


@dataclass(frozen=True)
class SamplingOptions(_Given):
    """How tokens are drawn; what is not given comes from the pair."""

    temperature: float | None = option("T", "0 is greedy; the pair has its own.")
    top_p: float | None = option("P", "Keep the likeliest tokens up to this share.")
    top_k: int | None = option("K", "Keep the K likeliest tokens; 0 keeps all.")
    min_p: float | None = option("P", "Drop tokens below this share of the likeliest.")
    seed: int | None = option("N", "Draw the same answer again.")

    def over(self, base: Sampling) -> Sampling:
        """Return `base` with the given values put over it; raise OptionError for one out of range."""
        return replace(base, **self.given())


@dataclass(frozen=True)
class DecodingOptions:
    """How far and how wide to decode."""

    max_tokens: int = option("N", "End the answer after N tokens.", 2048)
    block_size: int | None = option("N", "Tokens per verify, anchor included.")
    no_block_cap: bool = flag("--no-block-cap", "Allow wide blocks with a 4-bit target.")
    denoise_steps: int = option("N", "Draft passes over a block.", 1)

    def settings(self) -> dict[str, Any]:
        """Return the options as arguments of `generate`; raise OptionError for a value out of range."""
        named: dict[str, Any] = {**vars(self), "block_cap": not self.no_block_cap}
        del named["no_block_cap"]
        Options(**named)
        return named


@dataclass(frozen=True)
class BriefDecodingOptions(DecodingOptions):
    """The same for commands that decode each prompt several times."""

    max_tokens: int = option("N", "End each answer after N tokens.", 128)


@dataclass(frozen=True)
class TextOptions:
    """What goes around the prompt and ends the answer, and what is told about it."""

    system: str | None = option("TEXT", "System message.")
    reasoning: str | None = option("LEVEL", "off, low, medium or xhigh.")
    stop: list[str] | None = option("TEXT", "End the answer before this text; repeatable.")
    no_draft: bool = flag("--no-draft", "Plain decoding, without the draft.")
    stats: bool = flag("--stats", "Print speed and acceptance on stderr.")

    def settings(self) -> dict[str, Any]:
        """Return the options as arguments of `generate`; raise OptionError for a value out of range."""
        stop = tuple(self.stop or ())
        Options(stop=stop)
        return {"system": self.system, "reasoning": self.reasoning, "stop": stop, "speculate": not self.no_draft}

    def sampling(self, given: SamplingOptions, pair: Any) -> Sampling:
        """Return the pair's own sampling, which differs where reasoning is off, under what was given."""
        return given.over(pair.sampling_plain if self.reasoning == "off" else pair.sampling)


@dataclass(frozen=True)
class PromptOptions:
    """How generate reads its prompt and prints the answer."""

    file: list[Path] | None = option("PATH", "Put a file before the prompt; repeatable.")
    raw: bool = flag("--raw", "Take the prompt as it stands, without the chat template.")
    json: bool = flag("--json", "Print one JSON object.")


Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Prompts = Annotated[list[str] | None, typer.Argument(metavar="PROMPT", help="Without any, five built-in ones.")]
