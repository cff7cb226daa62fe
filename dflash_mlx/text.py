"""Prompts to token ids, and token ids back to text as it may be shown; knows no model."""

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal, NamedTuple

from dflash_mlx.errors import OptionError, PromptError
from dflash_mlx.types import Message, Prompt

Kind = Literal["answer", "reasoning"]
ROLES = ("system", "user", "assistant", "tool")
REASONING = ("off", "low", "medium", "xhigh")
OPEN, CLOSE = "<think>", "</think>"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Piece(NamedTuple):
    """Text that is safe to show, and what it is part of."""

    text: str
    kind: Kind = "answer"


def _checked_text(text: object, what: str) -> str:
    if not isinstance(text, str):
        raise PromptError(f"{what} must be text, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PromptError(f"{what} is not valid Unicode text") from None
    return text


def _as_chat(prompt: Any, raw: bool, system: str | None) -> list[Message]:
    """Return checked messages for a text or a list of messages, with `system` put first."""
    if raw:
        raise PromptError("a raw prompt must be one text; chat messages need the chat template")
    if isinstance(prompt, str):
        if not _checked_text(prompt, "the prompt").strip():
            raise PromptError("the prompt is empty")
        prompt = [{"role": "user", "content": prompt}]
    messages = _checked_messages(prompt)
    if system is None:
        return messages
    if messages[0]["role"] == "system":
        raise PromptError("the chat already begins with a system message; leave out the other one")
    return [{"role": "system", "content": _checked_text(system, "the system message")}, *messages]


def _checked_messages(prompt: Sequence[Any]) -> list[Message]:
    for at, message in enumerate(prompt):
        if not isinstance(message, dict):
            raise PromptError(f"message {at} must be a dict with role and content, not {message!r}")
        if message.get("role") not in ROLES:
            raise PromptError(f"message {at} has role {message.get('role')!r}; known roles are {', '.join(ROLES)}")
        if not (message.get("content") is None and message.get("tool_calls")):
            _checked_text(message.get("content"), f"the content of message {at}")
    if not any(message["role"] == "user" for message in prompt):
        raise PromptError("the chat has no user message, so there is nothing to answer")
    return list(prompt)


class Tokenizer:
    """One checkpoint's tokenizer and chat template, around mlx-lm's TokenizerWrapper.

    `vocab_size` is the model's (ids from there on are refused); without it the tokenizer's own length counts.
    """

    def __init__(self, wrapper: Any, vocab_size: int | None = None) -> None:
        # mlx-lm's wrapper forces enable_thinking on; the tokenizer inside leaves the template its own default.
        self.inner = wrapper._tokenizer
        self.eos_ids = frozenset(wrapper.eos_token_ids)
        self.vocab_size = vocab_size or len(self.inner)
        self.special_ids = frozenset(i for i, token in self.inner.added_tokens_decoder.items() if token.special)

    @property
    def template(self) -> str | None:
        """Source of the default chat template, or None."""
        found = self.inner.chat_template
        return found.get("default") if isinstance(found, dict) else found

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Return the text of `ids` exactly as the tokens spell it, control tokens only with `special`."""
        text: str = self.inner.decode(list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        return text

    def is_byte(self, token: int) -> bool:
        """Tell whether `token` is a byte-fallback token, whose text depends on its neighbours."""
        return bool(_BYTE_TOKEN.fullmatch(self.inner.convert_ids_to_tokens(token) or ""))

    def thinks_first(self, ids: Sequence[int]) -> bool:
        """Tell whether the prompt `ids` end inside an open think block, so that the answer begins with reasoning."""
        return self.decode(ids[-16:], special=True).rstrip().endswith(OPEN)

    def encode_prompt(
        self, prompt: Prompt, *, raw: bool = False, system: str | None = None, reasoning: str | None = None
    ) -> list[int]:
        """Return the token ids of a text, a list of chat messages, or a list of ids; raise PromptError with the reason.

        `raw` takes a text as it stands, without the chat template. `reasoning` is one of REASONING.
        """
        if isinstance(prompt, str):
            chat = not raw
        elif isinstance(prompt, (list, tuple)) and prompt:
            chat = not isinstance(prompt[0], int)
        else:
            raise PromptError(f"a prompt is a text, chat messages or token ids, and not empty; this one is {prompt!r}")
        if chat:
            return self._render(_as_chat(prompt, raw, system), self._switches(reasoning))
        if system is not None or reasoning is not None:
            raise PromptError("a prompt taken as it stands has no place for a system message or a reasoning level")
        return self._encode_raw(prompt) if isinstance(prompt, str) else self._checked_ids(prompt)

    def _encode_raw(self, prompt: str) -> list[int]:
        bos = self.inner.bos_token
        text = _checked_text(prompt, "the prompt")
        begins = bool(bos) and text.startswith(bos)
        ids: list[int] = self.inner.encode(text, add_special_tokens=not begins) if text else []
        if not ids:
            raise PromptError("the prompt is empty")
        return ids

    def _checked_ids(self, prompt: Any) -> list[int]:
        for at, token in enumerate(prompt):
            if not isinstance(token, int) or isinstance(token, bool):
                raise PromptError(f"token {at} of the prompt must be an id, not {token!r}")
            if not 0 <= token < self.vocab_size:
                raise PromptError(
                    f"token {at} of the prompt is {token}; the vocabulary has ids 0 to {self.vocab_size - 1}"
                )
        return list(prompt)

    def _switches(self, reasoning: str | None) -> dict[str, Any]:
        """Return the template variables for a reasoning level, looked up in what the template's source mentions."""
        if reasoning is None:
            return {}
        level = "xhigh" if reasoning == "high" else reasoning
        if level not in REASONING:
            raise OptionError(f"reasoning must be one of {', '.join(REASONING)}, not {reasoning!r}")
        words = set(re.findall(r"\w+", self.template or ""))
        on = {"enable_thinking": True} if "enable_thinking" in words else {}
        offers: dict[str, dict[str, Any]] = {"off": {"enable_thinking": False}, "xhigh": on} if on else {}
        if "reasoning_effort" in words:
            offers |= {effort: {**on, "reasoning_effort": effort} for effort in REASONING[1:]}
        if level not in offers:
            known = f"only the reasoning levels {', '.join(offers)}" if offers else "no reasoning levels"
            raise PromptError(f"reasoning {reasoning!r} would have no effect: this model's chat template has {known}")
        return offers[level]

    def _render(self, messages: list[Message], switches: dict[str, Any]) -> list[int]:
        from jinja2 import TemplateError

        if self.template is None:
            raise PromptError("this model has no chat template; use --raw (raw=True) to send the text as it stands")
        try:
            ids: list[int] = self.inner.apply_chat_template(
                messages, tokenize=True, add_generation_prompt=True, return_dict=False, **switches
            )
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise PromptError(f"the chat template refused the messages: {reason}") from error
        return ids


class _Detokenizer:
    """Token ids to text, one at a time; a character is held back until all its bytes are there.

    The texts together equal `Tokenizer.decode` of all ids: a piece ends only where the decoder keeps no memory, that is
    after a whole character and outside a run of byte tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.shown: list[int] = []  # the last piece, as context: some decoders treat the first token otherwise
        self.held: list[int] = []

    def add(self, token: int) -> str:
        if token in self.tokenizer.special_ids:
            return ""
        self.held.append(token)
        text = self._text()
        if text.endswith("\ufffd") or self.tokenizer.is_byte(token):
            return ""
        self.shown, self.held = self.held, []
        return text

    def rest(self) -> str:
        return self._text() if self.held else ""

    def _text(self) -> str:
        return self.tokenizer.decode(self.shown + self.held)[len(self.tokenizer.decode(self.shown)) :]


def _partial(text: str, marks: Iterable[str]) -> int:
    """Return the length of the longest end of `text` that begins, but does not complete, one of `marks`."""
    longest = max((len(mark) - 1 for mark in marks), default=0)
    sizes = range(min(longest, len(text)), 0, -1)
    return next((n for n in sizes if any(mark.startswith(text[-n:]) for mark in marks)), 0)


class _Splitter:
    """Text to pieces of reasoning and answer; only a think block before the answer counts, later tags are text."""

    def __init__(self, inside: bool) -> None:
        self.state: Literal["start", "inside", "answer"] = "inside" if inside else "start"
        self.held = ""
        self.at_edge = inside  # line ends after a tag belong to the tag

    def add(self, text: str, last: bool = False) -> list[Piece]:
        text, self.held = self.held + text, ""
        pieces: list[Piece] = []
        if self.state == "start":
            lead = text.lstrip()
            if lead.startswith(OPEN):
                self.state, self.at_edge, text = "inside", True, lead[len(OPEN) :]
            elif OPEN.startswith(lead) and not last:
                self.held = text
                return []
            else:
                self.state = "answer"
        if self.state == "inside":
            reasoning, tag, text = text.partition(CLOSE)
            if not tag and not last and (n := _partial(reasoning, (CLOSE,))):
                reasoning, self.held = reasoning[:-n], reasoning[-n:]
            pieces += self._piece(reasoning, "reasoning")
            if tag:
                self.state, self.at_edge = "answer", True
        return pieces + self._piece(text, "answer")

    def _piece(self, text: str, kind: Kind) -> list[Piece]:
        text = text.lstrip("\n") if self.at_edge else text
        self.at_edge = self.at_edge and not text
        return [Piece(text, kind)] if text else []


class TextStream:
    """One generation's text: ids in, pieces out, with no part of a character, tag or stop string ever shown.

    A stop string ends the answer before its first character, wherever token borders fall; `stopped` then is True.
    `used` counts the ids taken, up to and with the one that completed the stop string.
    """

    def __init__(self, tokenizer: Tokenizer, *, stop: Collection[str] = (), inside_think: bool = False) -> None:
        self.stopped = False
        self.used = 0
        self._stop = tuple(stop)
        self._eos = tokenizer.eos_ids
        self._detokenizer = _Detokenizer(tokenizer)
        self._splitter = _Splitter(inside_think)
        self._held = ""

    def feed(self, ids: Iterable[int]) -> list[Piece]:
        """Return the pieces that `ids` complete, joined by kind; ids after a stop string are not taken."""
        pieces: list[Piece] = []
        for token in ids:
            if self.stopped:
                break
            self.used += 1
            if token not in self._eos:
                pieces += self._add(self._detokenizer.add(token), last=False)
        return _joined(pieces)

    def finish(self) -> list[Piece]:
        """Return what was held back, once no more ids come."""
        return [] if self.stopped else _joined(self._add(self._detokenizer.rest(), last=True))

    def _add(self, text: str, last: bool) -> list[Piece]:
        found: list[Piece] = []
        for piece in self._splitter.add(text, last):
            if piece.kind == "reasoning":
                found.append(piece)
            elif not self.stopped:
                found.append(Piece(self._until_stop(piece.text)))
        if last and not self.stopped:
            found.append(Piece(self._held))
        return found

    def _until_stop(self, text: str) -> str:
        """Return the answer text that is certain; the stop string that is complete first wins, then the longer one."""
        text, self._held = self._held + text, ""
        ends = [(at + len(mark), at) for mark in self._stop if (at := text.find(mark)) >= 0]
        if ends:
            self.stopped = True
            return text[: min(ends)[1]]
        if n := _partial(text, self._stop):
            text, self._held = text[:-n], text[-n:]
        return text


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Return the non-empty pieces, neighbours of one kind as one."""
    done: list[Piece] = []
    for piece in pieces:
        if done and done[-1].kind == piece.kind:
            done[-1] = Piece(done[-1].text + piece.text, piece.kind)
        elif piece.text:
            done.append(piece)
    return done
