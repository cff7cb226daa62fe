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


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise PromptError(f"{what} must be text, not {type(value).__name__}")
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise PromptError(f"{what} is not valid Unicode text")
    return value


def _messages(prompt: Sequence[Any]) -> list[Message]:
    for at, message in enumerate(prompt):
        if not isinstance(message, dict):
            raise PromptError(f"message {at} must be a dict with role and content, not {message!r}")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise PromptError(f"message {at} has role {role!r}; known roles are {', '.join(ROLES)}")
        if content is not None or not message.get("tool_calls"):
            _text(content, f"the content of message {at}")
    if not any(message["role"] == "user" for message in prompt):
        raise PromptError("the chat has no user message, so there is nothing to answer")
    return list(prompt)


def _as_chat(prompt: Any, system: str | None) -> list[Message]:
    """Return checked messages for a text or a list of messages, with `system` put first."""
    if isinstance(prompt, str):
        if not _text(prompt, "the prompt").strip():
            raise PromptError("the prompt is empty")
        prompt = [{"role": "user", "content": prompt}]
    messages = _messages(prompt)
    if system is None:
        return messages
    if messages[0]["role"] == "system":
        raise PromptError("the chat already begins with a system message; leave out the other one")
    return [{"role": "system", "content": _text(system, "the system message")}, *messages]


class Tokenizer:
    """One checkpoint's tokenizer and chat template, around mlx-lm's TokenizerWrapper.

    `vocab_size` is the model's (ids from there on are refused); without it the tokenizer's own length counts.
    """

    def __init__(self, wrapper: Any, vocab_size: int | None = None) -> None:
        # mlx-lm's wrapper forces enable_thinking on; the tokenizer inside leaves the template its own default.
        self.inner = wrapper._tokenizer
        self.eos_ids = frozenset(wrapper.eos_token_ids)
        self.vocab_size = vocab_size or len(self.inner)
        added = self.inner.added_tokens_decoder.items()
        self.special_ids = frozenset(i for i, token in added if token.special and token.content not in (OPEN, CLOSE))

    @property
    def template(self) -> str | None:
        """Source of the default chat template, or None."""
        found = self.inner.chat_template
        return found.get("default") if isinstance(found, dict) else found

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Return the text of `ids` exactly as the tokens spell it, control tokens only with `special`."""
        kept = [token for token in ids if special or token not in self.special_ids]
        text: str = self.inner.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
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
        if not isinstance(prompt, str) and (not isinstance(prompt, (list, tuple)) or not prompt):
            raise PromptError(f"a prompt is a text, chat messages or token ids, and not empty; this one is {prompt!r}")
        as_it_stands = raw if isinstance(prompt, str) else isinstance(prompt[0], int)
        if not as_it_stands and raw:
            raise PromptError("a raw prompt must be one text; chat messages need the chat template")
        if not as_it_stands:
            return self._render(_as_chat(prompt, system), self._switches(reasoning))
        if system is not None or reasoning is not None:
            raise PromptError("a prompt taken as it stands has no place for a system message or a reasoning level")
        return self._raw(prompt) if isinstance(prompt, str) else self._ids(prompt)

    def _raw(self, prompt: str) -> list[int]:
        text, bos = _text(prompt, "the prompt"), self.inner.bos_token
        ids: list[int] = self.inner.encode(text, add_special_tokens=not (bos and text.startswith(bos)))
        if not text or not ids:
            raise PromptError("the prompt is empty")
        return ids

    def _ids(self, prompt: Sequence[Any]) -> list[int]:
        for at, token in enumerate(prompt):
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self.vocab_size:
                raise PromptError(f"token {at} of the prompt is {token!r}, not an id from 0 to {self.vocab_size - 1}")
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
        except (
            TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
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
        text = self.rest()
        if text.endswith("\ufffd") or self.tokenizer.is_byte(token):
            return ""
        self.shown, self.held = self.held, []
        return text

    def rest(self) -> str:
        return self.tokenizer.decode(self.shown + self.held)[len(self.tokenizer.decode(self.shown)) :]


def _safe(text: str, marks: Sequence[str]) -> int:
    """Return how much of `text` cannot be the beginning of one of `marks`."""
    longest = max(map(len, marks), default=1) - 1
    starts = range(max(len(text) - longest, 0), len(text))
    return next((at for at in starts if any(mark.startswith(text[at:]) for mark in marks)), len(text))


class _Splitter:
    """Parts reasoning from the answer; only a think block before the answer counts, later tags are text."""

    def __init__(self, inside: bool) -> None:
        self.state: Literal["start", "inside", "answer"] = "inside" if inside else "start"
        self.held = ""
        self.at_edge = inside  # line ends behind a tag belong to the tag

    def add(self, text: str, last: bool) -> tuple[str, str]:
        """Return the reasoning and then the answer that `text` completes."""
        text, self.held = self.held + text, ""
        if self.state == "start":
            lead = text.lstrip()
            if OPEN.startswith(lead) and lead != OPEN and not last:
                self.held = text
                return "", ""
            if lead.startswith(OPEN):
                self.state, self.at_edge, text = "inside", True, lead[len(OPEN) :]
            else:
                self.state = "answer"
        if self.state == "answer":
            return "", self._trim(text)
        reasoning, tag, answer = text.partition(CLOSE)
        if not tag and not last:
            safe = _safe(reasoning, (CLOSE,))
            reasoning, self.held = reasoning[:safe], reasoning[safe:]
        reasoning = self._trim(reasoning)
        if tag:
            self.state, self.at_edge = "answer", True
        return reasoning, self._trim(answer)

    def _trim(self, text: str) -> str:
        text = text.lstrip("\n") if self.at_edge else text
        self.at_edge = self.at_edge and not text
        return text


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
        """Return the pieces that `ids` complete, neighbours of a kind as one; ids after a stop string are not taken."""
        pieces: list[Piece] = []
        for token in ids:
            if self.stopped:
                break
            self.used += 1
            if token not in self._eos:
                self._add(pieces, self._detokenizer.add(token))
        return pieces

    def finish(self) -> list[Piece]:
        """Return what was held back, once no more ids come."""
        pieces: list[Piece] = []
        if not self.stopped:
            self._add(pieces, self._detokenizer.rest(), last=True)
        return pieces

    def _add(self, pieces: list[Piece], text: str, last: bool = False) -> None:
        reasoning, answer = self._splitter.add(text, last)
        for part in (Piece(reasoning, "reasoning"), Piece(self._until_stop(answer, last))):
            if part.text and pieces and pieces[-1].kind == part.kind:
                pieces[-1] = Piece(pieces[-1].text + part.text, part.kind)
            elif part.text:
                pieces.append(part)

    def _until_stop(self, text: str, last: bool) -> str:
        """Return the answer text that is certain; the stop string that is complete first wins, then the longer one."""
        text, self._held = self._held + text, ""
        ends = [(at + len(mark), at) for mark in self._stop if (at := text.find(mark)) >= 0]
        self.stopped = bool(ends)
        safe = min(ends)[1] if ends else len(text) if last else _safe(text, self._stop)
        self._held = text[safe:]
        return text[:safe]
