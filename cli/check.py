"""check: is speculative decoding lossless here."""

import json as jsonlib
import textwrap
from dataclasses import asdict
from typing import Any

import typer

from dflash_mlx.cli.engine import open_drafted
from dflash_mlx.cli.options import BriefDecodingOptions, Json, PairOptions, Prompts
from dflash_mlx.cli.render import Screen

PROMPTS = (
    "Explain in three sentences how a rainbow comes about.",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "List seven kitchen tools and say what each is for.",
    "Tell a short story about a lighthouse keeper who finds a letter.",
    "What is 17 * 24? Show the steps.",
)


def check(
    ctx: typer.Context,
    prompts: Prompts = None,
    json: Json = False,
    *,
    decoding: BriefDecodingOptions,
    pair: PairOptions,
) -> None:
    """Compare speculative with plain decoding. Both are greedy; a difference that is no tie gives exit code 1."""
    settings, engine = decoding.settings(), ctx.obj()
    loaded = open_drafted(engine, Screen.standard(), pair, settings)
    asked, found = prompts or PROMPTS, []
    for prompt, one in zip(asked, engine.check(asked, pair=loaded, **settings), strict=True):
        found.append({"prompt": prompt, "ok": one.ok, **asdict(one)})
        if not json:
            print(verdict(prompt, one, loaded.tokenizer), flush=True)
    wrong = sum(not one["ok"] for one in found)
    told = jsonlib.dumps({"lossless": not wrong, "checks": found}, ensure_ascii=False)
    print(told if json else f"{len(found) - wrong} of {len(found)} lossless")
    if wrong:
        raise typer.Exit(1)


def verdict(prompt: str, one: Any, tokenizer: Any) -> str:
    """Return one prompt's outcome in a line, a difference with both ids, their texts and the margin in logits."""
    name = textwrap.shorten(prompt, 48, placeholder=" …")
    if one.position is None:
        return f"equal    {one.compared} tokens  {name}"
    where = f"{'tie' if one.tie else 'DIFFERS'}  at token {one.position}  {name}: "
    if one.plain_id is None:
        return where + "one of the two ends here"
    plain, fast = (f"{i} {tokenizer.decode([i], special=True)!r}" for i in (one.plain_id, one.speculative_id))
    return f"{where}plain {plain}, speculative {fast}, margin {one.margin:.4g}"
