"""generate: answer one prompt."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from dflash_mlx.cli.options import (
    DecodingOptions,
    Files,
    Json,
    NoDraft,
    PairOptions,
    SamplingOptions,
    ShowStats,
    TextOptions,
)
from dflash_mlx.cli.render import Answer, Screen
from dflash_mlx.cli.start import open_pair, sampling_for
from dflash_mlx.errors import OptionError, PromptError
from dflash_mlx.types import Completion, Sampling


def generate(
    ctx: typer.Context,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="`-` or nothing reads a pipe.", show_default=False)
    ] = None,
    file: Files = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Take the prompt as it stands, without the chat template.")
    ] = False,
    json: Json = False,
    no_draft: NoDraft = False,
    stats: ShowStats = False,
    *,
    text: TextOptions,
    sampling: SamplingOptions,
    decoding: DecodingOptions,
    pair: PairOptions,
) -> None:
    """Answer one prompt. A pipe is put behind the prompt, files before it."""
    settings = {"raw": raw, **text.settings(), **decoding.settings(), "speculate": not no_draft}
    sampling.over(Sampling())  # a bad value is refused before anything is loaded
    question = read_prompt(prompt, file or ())
    screen, engine = Screen.standard(), ctx.obj()
    loaded, _ = open_pair(engine, screen, pair, settings, show=stats)
    settings |= {"pair": loaded, "sampling": sampling.over(sampling_for(loaded, text.reasoning))}
    if json:
        print(as_json(engine.generate(question, **settings)))
        return
    answer = Answer()
    screen.draw(engine.stream(question, **settings), answer)
    screen.report(answer, decoding.max_tokens, stats)


def read_prompt(prompt: str | None, files: Sequence[Path]) -> str:
    """Return files, prompt and pipe as one text; raise PromptError for a file that is no text."""
    parts = [_quoted(path) for path in files]
    if prompt not in (None, "-"):
        parts.append(prompt)
    terminal = sys.stdin is None or sys.stdin.isatty()
    if not terminal and (piped := sys.stdin.read()).strip():
        parts.append(piped)
    elif prompt == "-" or not parts:
        missing = "the prompt is empty: nothing came through the pipe"
        raise OptionError("give a prompt, or pipe one in") if terminal else PromptError(missing)
    return "\n\n".join(parts)


def _quoted(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise PromptError(f"{path} is not UTF-8 text") from None
    except OSError as error:
        raise PromptError(f"{path} cannot be read: {error.strerror}") from error
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{path.name}:\n{fence}\n{text.rstrip()}\n{fence}"


def as_json(done: Completion) -> str:
    """Return a completion as one JSON object: its text, ids and every figure."""
    named: dict[str, Any] = {
        "text": done.text,
        "reasoning": done.reasoning,
        "tokens": done.tokens,
        "finish_reason": done.finish_reason,
        **asdict(done.stats),
    }
    return json.dumps(named, ensure_ascii=False)
