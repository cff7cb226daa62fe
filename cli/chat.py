"""chat: talk with a pair, turn by turn."""

import contextlib
import sys
from collections.abc import Iterator

import typer

from dflash_mlx.cli import commands
from dflash_mlx.cli.commands import Session
from dflash_mlx.cli.engine import open_pair
from dflash_mlx.cli.options import DecodingOptions, PairOptions, SamplingOptions, TextOptions
from dflash_mlx.cli.render import Answer, Screen
from dflash_mlx.errors import DFlashError
from dflash_mlx.types import Sampling

FENCE = '"""'


def chat(
    ctx: typer.Context, *, text: TextOptions, sampling: SamplingOptions, decoding: DecodingOptions, pair: PairOptions
) -> None:
    """Talk with a pair. /help lists what else can be typed."""
    settings = {**text.settings(), **decoding.settings()}
    sampling.over(Sampling())  # a bad value is refused before anything is loaded
    screen, engine = Screen.standard(), ctx.obj()
    loaded, plan = open_pair(engine, screen, pair, settings, show=text.stats)
    settings |= {"pair": loaded, "sampling": text.sampling(sampling, loaded)}
    session, reader = Session(engine, screen, loaded, plan, settings), Reader(screen)
    if reader.interactive:
        screen.line("/help lists the commands, Ctrl-C ends an answer, Ctrl-D leaves")
    for message in reader.messages():
        if not commands.run(session, message):
            got = answer(session, message, strict=not reader.interactive)
            screen.report(got, decoding.max_tokens, text.stats)
        if not session.open:
            return


def answer(session: Session, message: str, *, strict: bool) -> Answer:
    """Answer one message and return what came of it.

    Ctrl-C ends only the answer, and a refused message leaves the conversation as it was.
    `strict` lets a refusal end the chat, for input that no one can correct.
    """
    asked, got = [*session.messages, {"role": "user", "content": message}], Answer()
    try:
        session.screen.draw(session.engine.stream(asked, **session.settings), got)
    except KeyboardInterrupt:
        kept, dropped = "the part above stays in the conversation", "the message is dropped, nothing was answered yet"
        session.screen.line(f"(stopped; {kept if got.text else dropped})")
    except DFlashError as error:
        if strict:
            raise
        session.screen.line(f"dflash-mlx: {error}")
    if got.text or got.finish_reason:
        thoughts = {"reasoning_content": got.reasoning} if got.reasoning else {}
        session.messages = [*asked, {"role": "assistant", "content": got.text, **thoughts}]
    if got.stats:
        session.turns.append((got.stats, got.finish_reason))
    return got


class Reader:
    """Reads messages from a keyboard or a pipe: a line each, or all lines between two triple quotes."""

    def __init__(self, screen: Screen) -> None:
        self.screen = screen
        self.interactive = sys.stdin is not None and sys.stdin.isatty()
        if self.interactive:
            with contextlib.suppress(ImportError):
                import readline

                if "GNU" in (readline.__doc__ or ""):
                    readline.parse_and_bind("set enable-bracketed-paste on")  # a paste of several lines is one message

    def messages(self) -> Iterator[str]:
        """Yield messages until the input ends or Ctrl-C comes twice in a row."""
        warned = False
        while True:
            try:
                message = self._message()
            except KeyboardInterrupt:
                if warned or not self.interactive:
                    raise
                warned = True
                self.screen.line("\n(Ctrl-C again or Ctrl-D leaves)")
                continue
            warned = False
            if message is None:
                return
            if message.strip():
                yield message

    def _message(self) -> str | None:
        text = self._line("> ")
        if text is None or not text.lstrip().startswith(FENCE):
            return text
        text = text.lstrip().removeprefix(FENCE)
        while not text.rstrip().endswith(FENCE) and (more := self._line(". ")) is not None:
            text += f"\n{more}"
        return text.rstrip().removesuffix(FENCE).strip("\n")

    def _line(self, prompt: str) -> str | None:
        """Return one line without its end, or None at the end of the input."""
        if not self.interactive:
            line = sys.stdin.readline() if sys.stdin else ""
            return line.rstrip("\r\n") if line else None
        if not self.screen.live:  # the answer goes to a file, which the prompt must not enter
            print(prompt, end="", file=self.screen.err, flush=True)
        try:
            return input(prompt if self.screen.live else "")
        except EOFError:
            print(file=self.screen.err)
            return None
