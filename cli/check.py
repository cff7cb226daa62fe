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
    found = []
    for prompt in prompts or PROMPTS:
        found += engine.check([prompt], pair=loaded, **settings)
        if not json:
            print(verdict(found[-1], loaded.tokenizer), flush=True)
    wrong = sum(not (one.equal or one.tie) for one in found)
    if json:
        print(jsonlib.dumps({"lossless": not wrong, "checks": [asdict(one) for one in found]}, ensure_ascii=False))
    else:
        print(f"{len(found) - wrong} of {len(found)} lossless")
    if wrong:
        raise typer.Exit(1)


def verdict(one: Any, tokenizer: Any) -> str:
    """Return one prompt's outcome in a line, a difference with both ids, their texts and the margin in logits."""
    prompt = one.prompt if len(one.prompt) <= 48 else one.prompt[:47] + "…"
    if one.equal:
        return f"equal   {prompt}"
    plain, fast = (f"{token} {tokenizer.decode([token], special=True)!r}" for token in (one.plain_id, one.spec_id))
    where = f"at token {one.position}: plain {plain}, speculative {fast}, margin {one.margin:.4g}"
    return f"{'tie    ' if one.tie else 'DIFFERS'} {prompt} {where}"
