"""check: is speculative decoding lossless here."""

import json as jsonlib
from dataclasses import asdict
from typing import Annotated, Any

import typer

from dflash_mlx.cli.options import BriefDecodingOptions, Json, PairOptions
from dflash_mlx.cli.render import Screen
from dflash_mlx.cli.start import open_pair
from dflash_mlx.errors import OptionError

PROMPTS = (
    "Explain in three sentences how a rainbow comes about.",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "List seven kitchen tools and say what each is for.",
    "Tell a short story about a lighthouse keeper who finds a letter.",
    "What is 17 * 24? Show the steps.",
)


def check(
    ctx: typer.Context,
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="Without any, five built-in ones.")
    ] = None,
    json: Json = False,
    *,
    decoding: BriefDecodingOptions,
    pair: PairOptions,
) -> None:
    """Compare speculative with plain decoding. Both are greedy; a difference that is no tie gives exit code 1."""
    settings = decoding.settings()
    screen, engine = Screen.standard(), ctx.obj()
    loaded, plan = open_pair(engine, screen, pair, settings, show=True)
    if plan[0] == "plain":
        raise OptionError(
            "there is nothing to compare: this would be plain decoding (give a draft and a block above 1)"
        )
    asked, found = prompts or PROMPTS, []
    for prompt, one in zip(asked, engine.check(asked, pair=loaded, **settings), strict=True):
        found.append({"prompt": prompt, "ok": one.ok, **asdict(one)})
        if not json:
            print(verdict(prompt, one, loaded.tokenizer), flush=True)
    wrong = sum(not one["ok"] for one in found)
    if json:
        print(jsonlib.dumps({"lossless": not wrong, "checks": found}, ensure_ascii=False))
    else:
        print(f"{len(found) - wrong} of {len(found)} lossless")
    if wrong:
        raise typer.Exit(1)


def verdict(prompt: str, one: Any, tokenizer: Any) -> str:
    """Return one prompt's outcome in a line, a difference with both ids, their texts and the margin in logits."""
    name = " ".join(prompt.split())
    name = name if len(name) <= 48 else name[:47] + "…"
    if one.position is None:
        return f"equal    {one.compared} tokens  {name}"
    where = f"{'tie' if one.tie else 'DIFFERS'}  at token {one.position}  {name}: "
    if one.plain_id is None:
        return where + "one of the two ends here"
    plain, fast = (
        f"{token} {tokenizer.decode([token], special=True)!r}" for token in (one.plain_id, one.speculative_id)
    )
    return f"{where}plain {plain}, speculative {fast}, margin {one.margin:.4g}"
