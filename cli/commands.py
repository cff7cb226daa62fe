"""The chat's own commands: a table from name to function, whose docstring is its help."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dflash_mlx.cli.engine import Engine, Plan
from dflash_mlx.cli.render import Screen, banner, counted, stats_line
from dflash_mlx.types import Finish, Message, Stats

KEYS = {
    '"""': "begin and end a message of several lines",
    "Ctrl-C": "end the answer only",
    "Ctrl-D": "leave",
}


@dataclass
class Session:
    """One chat: what it runs on, what was said, and what it cost."""

    engine: Engine
    screen: Screen
    pair: Any
    plan: Plan
    settings: dict[str, Any]
    messages: list[Message] = field(default_factory=list)
    turns: list[tuple[Stats, Finish | None]] = field(default_factory=list)
    open: bool = True


def _help(session: Session) -> None:
    """Show this list."""
    entries = {f"/{name}": (act.__doc__ or "").rstrip(".").lower() for name, act in COMMANDS.items()} | KEYS
    for key, text in entries.items():
        session.screen.line(f"{key:<8} {text}")


def _reset(session: Session) -> None:
    """Forget what was said, but not the system message."""
    session.messages.clear()
    session.screen.line("the conversation is empty again")


def _stats(session: Session) -> None:
    """Show how the answers ran."""
    session.screen.line(banner(session.pair, *session.plan[:2]))
    if not session.turns:
        session.screen.line("no answer yet")
        return
    session.screen.line(f"last answer: {stats_line(*session.turns[-1])}")
    tokens = sum(stats.completion_tokens for stats, _ in session.turns)
    seconds = sum(stats.decode_s for stats, _ in session.turns)
    session.screen.line(f"since the start: {counted(len(session.turns), 'answer')}, {tokens} tokens in {seconds:.2f} s")


def _exit(session: Session) -> None:
    """Leave."""
    session.open = False


COMMANDS: dict[str, Callable[[Session], None]] = {"help": _help, "reset": _reset, "stats": _stats, "exit": _exit}


def run(session: Session, text: str) -> bool:
    """Run `text` if it is a command, which is a slash and one word, or the beginning of one; tell whether it was."""
    if not (named := re.fullmatch(r"/([A-Za-z]*)\s*", text)):
        return False
    begun = [name for name in COMMANDS if name.startswith(named[1].lower())]
    if len(begun) == 1:
        COMMANDS[begun[0]](session)
    elif begun:
        session.screen.line(f"/{named[1]} could be " + " or ".join(f"/{name}" for name in begun))
    else:
        session.screen.line(f"there is no /{named[1]}; /help lists what there is")
    return True
