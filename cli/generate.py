"""generate: answer one prompt."""

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from select import select
from typing import Annotated

import typer

from dflash_mlx.cli.engine import open_pair
from dflash_mlx.cli.options import DecodingOptions, PairOptions, PromptOptions, SamplingOptions, TextOptions
from dflash_mlx.cli.render import Answer, Screen
from dflash_mlx.errors import OptionError, PromptError
from dflash_mlx.types import Completion, Sampling

PATIENCE_S = 3.0


def generate(
    ctx: typer.Context,
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT", help="`-` or nothing reads a pipe.")] = None,
    *,
    asking: PromptOptions,
    text: TextOptions,
    sampling: SamplingOptions,
    decoding: DecodingOptions,
    pair: PairOptions,
) -> None:
    """Answer one prompt. A pipe is put behind the prompt, files before it."""
    settings = {"raw": asking.raw, **text.settings(), **decoding.settings()}
    sampling.over(Sampling())  # a bad value is refused before anything is loaded
    question = read_prompt(prompt, asking.file or ())
    screen, engine = Screen.standard(), ctx.obj()
    loaded, _ = open_pair(engine, screen, pair, settings, show=text.stats)
    settings |= {"pair": loaded, "sampling": text.sampling(sampling, loaded)}
    if asking.json:
        print(as_json(engine.generate(question, **settings)))
        return
    answer = Answer()
    screen.draw(engine.stream(question, **settings), answer)
    screen.report(answer, decoding.max_tokens, text.stats)


def read_prompt(prompt: str | None, files: Sequence[Path]) -> str:
    """Return files, prompt and pipe as one text; raise PromptError for a file that is no text."""
    parts = [_quoted(path) for path in files]
    if prompt not in (None, "-"):
        parts.append(prompt)
    terminal = sys.stdin is None or sys.stdin.isatty()
    if not terminal and (piped := _piped()).strip():
        parts.append(piped)
    elif prompt == "-" or not parts:
        empty = "the prompt is empty: nothing came through the pipe"
        raise OptionError("give a prompt, or pipe one in") if terminal else PromptError(empty)
    return "\n\n".join(parts)


def _piped() -> str:
    """Read the pipe to its end; say so where it keeps the user waiting, for it may never end."""
    with suppress(OSError, ValueError):  # a stream that cannot be waited for
        if not select([sys.stdin], [], [], PATIENCE_S)[0]:
            Screen.standard().note("waiting for the pipe, which has sent nothing yet (</dev/null if there is none)")
    return sys.stdin.read()


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
    told = {"text": done.text, "reasoning": done.reasoning, "tokens": done.tokens, "finish_reason": done.finish_reason}
    return json.dumps(told | asdict(done.stats), ensure_ascii=False)
