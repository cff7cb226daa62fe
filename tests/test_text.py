"""Prompts become ids and ids become text: templates, reasoning levels, characters, think blocks and stop strings."""

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_wrapper
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from dflash_mlx.errors import OptionError, PromptError
from dflash_mlx.text import Piece, TextStream, Tokenizer

FOLDER = Path(__file__).parent / "data" / "checkpoints" / "t-hybrid-fp32"
MIXED = "👋 ďábelské 非常, naïve ñandú ß 🙂‍↔️!"
WRAPPER = load_wrapper(FOLDER, eos_token_ids=[510, 508])
TOKENIZER = Tokenizer(WRAPPER)
ANY_ID = st.integers(0, len(WRAPPER) - 1)

SWITCHED = """\
{%- if messages[0].role not in ['system', 'user'] %}{{ raise_exception('begin with\n a user') }}{% endif %}
{%- set effort = reasoning_effort | default('xhigh') %}
{%- if effort not in ['xhigh', 'medium', 'low'] %}{{ raise_exception('unknown effort') }}{% endif %}
{%- if enable_thinking is not defined or enable_thinking %}
{%- if effort != 'medium' %}<|im_start|>system\nThink at level {{ effort }}<|im_end|>\n{% endif %}
{%- endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant\n
{%- if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}
{%- endif %}"""


def with_template(template):
    wrapper = load_wrapper(FOLDER)
    wrapper._tokenizer.chat_template = template
    return Tokenizer(wrapper)


def ids_of(text):
    return WRAPPER.encode(text, add_special_tokens=False)


def shown(stream, groups):
    pieces = [piece for ids in groups for piece in stream.feed(ids)]
    return pieces + stream.finish()


def text_of(pieces, kind="answer"):
    return "".join(piece.text for piece in pieces if piece.kind == kind)


def groupings(ids):
    """The ids one by one, all at once, and in blocks of 2, 3 and 8."""
    for size in (1, 2, 3, 8, len(ids) or 1):
        yield [ids[at : at + size] for at in range(0, len(ids), size)]


def one_letter_ids(text):
    """Ids of `text` with a token per byte, so that a border falls inside every character."""
    return [token for char in text for byte in char.encode() for token in [BYTE_IDS[byte]]]


def byte_table():
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return {byte: chr(byte) if byte in plain else chr(next(spare)) for byte in range(256)}


BYTE_IDS = {byte: WRAPPER.convert_tokens_to_ids(char) for byte, char in byte_table().items()}


class TestPrompts:
    def test_a_text_is_one_user_message(self):
        assert TOKENIZER.encode_prompt("hi") == TOKENIZER.encode_prompt([{"role": "user", "content": "hi"}])
        text = TOKENIZER.decode(TOKENIZER.encode_prompt("hi"), special=True)
        assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"

    def test_system_comes_first_and_once(self):
        text = TOKENIZER.decode(TOKENIZER.encode_prompt("hi", system="be brief"), special=True)
        assert text.startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n")
        assert text.count("be brief") == 1

    def test_raw_text_and_ids_pass_as_they_stand(self):
        assert TOKENIZER.encode_prompt("hi there", raw=True) == ids_of("hi there")
        assert TOKENIZER.encode_prompt([5, 511, 0]) == [5, 511, 0]

    def test_a_raw_prompt_gets_its_beginning_token_once(self):
        wrapper = load_wrapper(FOLDER)
        wrapper._tokenizer.bos_token = "<|endoftext|>"
        assert Tokenizer(wrapper).encode_prompt("<|endoftext|>hi", raw=True).count(508) == 1

    @pytest.mark.parametrize(
        "prompt, options, words",
        [
            ("", {}, "empty"),
            ("  \n", {}, "empty"),
            ("", {"raw": True}, "empty"),
            ([], {}, "not empty"),
            (None, {}, "None"),
            ("a\ud800b", {}, "Unicode"),
            ("a\ud800b", {"raw": True}, "Unicode"),
            ([512], {}, "0 to 511"),
            ([1, -1], {}, "token 1"),
            ([1, 2.5], {}, "2.5"),
            ([1, True], {}, "True"),
            (["hi"], {}, "dict"),
            ([{"role": "robot", "content": "x"}], {}, "'robot'"),
            ([{"role": "user"}], {}, "content of message 0"),
            ([{"role": "user", "content": ["x"]}], {}, "list"),
            ([{"role": "system", "content": "x"}], {}, "no user message"),
            ([{"role": "user", "content": "x"}], {"raw": True}, "raw"),
            ([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}], {"system": "c"}, "already"),
            ([3], {"system": "x"}, "system"),
            ("x", {"raw": True, "reasoning": "off"}, "reasoning"),
            ("x", {"reasoning": "off"}, "no reasoning levels"),
        ],
    )
    def test_a_bad_prompt_is_refused_in_one_line(self, prompt, options, words):
        with pytest.raises(PromptError, match=words) as error:
            TOKENIZER.encode_prompt(prompt, **options)
        assert "\n" not in str(error.value)

    def test_the_models_vocabulary_counts_not_the_tokenizers(self):
        assert Tokenizer(WRAPPER, 600).encode_prompt([599]) == [599]
        with pytest.raises(PromptError, match="0 to 599"):
            Tokenizer(WRAPPER, 600).encode_prompt([600])

    def test_no_template_points_to_raw(self):
        bare = with_template(None)
        assert bare.encode_prompt("hi", raw=True) == ids_of("hi")
        with pytest.raises(PromptError, match="--raw"):
            bare.encode_prompt("hi")

    def test_the_templates_own_refusal_is_one_line(self):
        chat = [{"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]
        with pytest.raises(PromptError, match="refused the messages: begin with a user"):
            with_template(SWITCHED).encode_prompt(chat)
        with pytest.raises(PromptError, match="refused the messages: .*missing"):
            with_template("{{ missing.attribute }}").encode_prompt("x")
        with pytest.raises(PromptError, match="refused the messages"):
            with_template("{% for %}").encode_prompt("x")


class TestReasoning:
    def test_every_level_changes_the_prompt(self):
        tokenizer = with_template(SWITCHED)
        lengths = {
            level: len(tokenizer.encode_prompt("hi", reasoning=level)) for level in ("off", "low", "medium", "xhigh")
        }
        assert len(set(lengths.values())) == 4, lengths
        assert tokenizer.encode_prompt("hi") == tokenizer.encode_prompt("hi", reasoning="xhigh")
        assert tokenizer.encode_prompt("hi", reasoning="high") == tokenizer.encode_prompt("hi", reasoning="xhigh")

    def test_thinking_first_follows_the_switch(self):
        tokenizer = with_template(SWITCHED)
        assert tokenizer.thinks_first(tokenizer.encode_prompt("hi"))
        assert not tokenizer.thinks_first(tokenizer.encode_prompt("hi", reasoning="off"))
        assert not tokenizer.thinks_first(tokenizer.encode_prompt("what does <think> mean?", reasoning="off"))
        assert not TOKENIZER.thinks_first(TOKENIZER.encode_prompt("hi"))

    def test_a_template_keeps_its_own_default(self):
        quiet = with_template("{{ messages[0].content }}{% if enable_thinking | default(false) %}<think>\n{% endif %}")
        assert not quiet.thinks_first(quiet.encode_prompt("hi"))
        assert quiet.thinks_first(quiet.encode_prompt("hi", reasoning="xhigh"))

    def test_a_switch_alone_has_no_levels(self):
        switch = with_template("{{ messages[0].content }}{% if enable_thinking %}<think>\n{% endif %}")
        with pytest.raises(PromptError, match="only the reasoning levels off, xhigh"):
            switch.encode_prompt("hi", reasoning="low")

    def test_levels_alone_have_no_off(self):
        levels = with_template("{{ messages[0].content }} {{ reasoning_effort }}")
        with pytest.raises(PromptError, match="only the reasoning levels low, medium, xhigh"):
            levels.encode_prompt("hi", reasoning="off")
        assert "low" in levels.decode(levels.encode_prompt("hi", reasoning="low"))

    def test_an_unknown_level_is_an_option_error(self):
        with pytest.raises(OptionError, match="off, low, medium, xhigh, not 'max'"):
            with_template(SWITCHED).encode_prompt("hi", reasoning="max")


def spm_tokenizer(strip=True):
    """A small tokenizer of the SentencePiece kind: a word-begin mark, byte-fallback tokens, one space stripped."""
    words = ["<unk>", "</s>", "▁", "▁Hello", "▁world", "x", "!"] + [f"<0x{byte:02X}>" for byte in range(256)]
    backend = Backend(models.BPE({word: at for at, word in enumerate(words)}, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * strip)
    return Tokenizer(
        TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="<unk>"))
    )


class TestCharacters:
    @pytest.mark.parametrize("ids", [ids_of(MIXED), one_letter_ids(MIXED)], ids=["tokens", "bytes"])
    def test_multi_byte_text_is_never_split(self, ids):
        for groups in groupings(ids):
            pieces = shown(TextStream(TOKENIZER), groups)
            assert text_of(pieces) == MIXED
            assert all("\ufffd" not in piece.text for piece in pieces)

    @given(st.lists(ANY_ID, max_size=60), st.randoms(use_true_random=False))
    def test_any_ids_give_the_decoders_text(self, ids, source):
        cuts = sorted(source.choices(range(len(ids) + 1), k=5))
        groups = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
        assert text_of(shown(TextStream(TOKENIZER), groups)) == TOKENIZER.decode(ids)

    @pytest.mark.parametrize("strip", [True, False])
    @given(ids=st.lists(st.integers(0, 6) | st.integers(7, 262), max_size=40))
    @settings(deadline=None)
    def test_the_same_for_byte_fallback_tokenizers(self, strip, ids):
        tokenizer = SPM[strip]
        assert text_of(shown(TextStream(tokenizer), [[token] for token in ids])) == tokenizer.decode(ids)

    def test_a_byte_run_waits_for_its_end(self):
        wave = [7 + byte for byte in "👋".encode()]
        stream = TextStream(SPM[True])
        assert [stream.feed([token]) for token in [3, *wave, 4]] == [
            [Piece("Hello")],
            [],
            [],
            [],
            [],
            [Piece("👋 world")],
        ]

    def test_half_a_character_at_the_end_is_shown_as_such(self):
        stream = TextStream(TOKENIZER)
        assert stream.feed(one_letter_ids("👋")[:2]) == []
        assert stream.finish() == [Piece("\ufffd")]

    def test_interleaved_streams_do_not_mix(self):
        left, right = one_letter_ids("👋 非"), one_letter_ids("ďá 🙂")
        a, b = TextStream(TOKENIZER), TextStream(TOKENIZER)
        texts = ["", ""]
        for at in range(max(len(left), len(right))):
            texts[0] += text_of(a.feed(left[at : at + 1]))
            texts[1] += text_of(b.feed(right[at : at + 1]))
        assert texts == ["👋 非", "ďá 🙂"]

    def test_control_and_end_tokens_are_never_text(self):
        for end in (508, 509, 510, 511):
            assert text_of(shown(TextStream(TOKENIZER), [[*ids_of("done"), end]])) == "done"

    def test_an_ordinary_token_may_be_an_end_token(self):
        wrapper = load_wrapper(FOLDER, eos_token_ids=[510, ids_of("!")[0]])
        assert text_of(shown(TextStream(Tokenizer(wrapper)), [ids_of("done!")])) == "done"

    def test_ids_beyond_the_tokenizer_have_no_text(self):
        assert text_of(shown(TextStream(Tokenizer(WRAPPER, 600)), [[*ids_of("a"), 599, *ids_of("b")]])) == "ab"


SPM = {strip: spm_tokenizer(strip) for strip in (True, False)}


class TestThinking:
    @pytest.mark.parametrize(
        "text, inside, reasoning, answer",
        [
            ("plan\n</think>\n\nAnswer", True, "plan\n", "Answer"),
            ("\nplan</think>Answer", True, "plan", "Answer"),
            ("</think>\nAnswer", True, "", "Answer"),
            ("never closed </thin", True, "never closed </thin", ""),
            ("<think>\nplan</think>\nAnswer", False, "plan", "Answer"),
            ("\n <think>plan</think>Answer", False, "plan", "Answer"),
            ("  Answer", False, "", "  Answer"),
            ("\n\nAnswer\n", False, "", "\n\nAnswer\n"),
            (" <thi", False, "", " <thi"),
            ("Use <think> and </think> tags", False, "", "Use <think> and </think> tags"),
            ("a</think>b <think> c</think>", True, "a", "b <think> c</think>"),
            ("1 < 2 </ 3", True, "1 < 2 </ 3", ""),
            ("", True, "", ""),
        ],
    )
    def test_reasoning_and_answer_part_at_every_chunking(self, text, inside, reasoning, answer):
        for ids in (ids_of(text), one_letter_ids(text)):
            for groups in groupings(ids):
                pieces = shown(TextStream(TOKENIZER, inside_think=inside), groups)
                assert (text_of(pieces, "reasoning"), text_of(pieces)) == (reasoning, answer)


class TestStops:
    @pytest.mark.parametrize(
        "text, stop, want",
        [
            ("alpha beta gamma delta", ["beta gamma"], "alpha "),
            ("alpha beta gamma delta", ["omega"], "alpha beta gamma delta"),
            ("aaab", ["aab"], "a"),
            ("abcd", ["bcd", "c"], "ab"),
            ("abcd", ["cd", "bcd"], "a"),
            ("one\n\ntwo", ["\n\n"], "one"),
            ("ends with a par", ["part"], "ends with a par"),
            ("stop at 👋 now", ["👋"], "stop at "),
            ("first", ["first"], ""),
        ],
    )
    def test_the_answer_ends_before_a_stop_string_at_every_chunking(self, text, stop, want):
        for ids in (ids_of(text), one_letter_ids(text)):
            for groups in groupings(ids):
                stream = TextStream(TOKENIZER, stop=stop)
                assert text_of(shown(stream, groups)) == want
                assert stream.stopped == (want != text)

    def test_every_split_in_two_gives_the_same(self):
        ids = one_letter_ids("alpha beta gamma delta")
        for cut in range(len(ids) + 1):
            assert text_of(shown(TextStream(TOKENIZER, stop=["beta gamma"]), [ids[:cut], ids[cut:]])) == "alpha "

    def test_ids_after_the_stop_are_not_used(self):
        ids = one_letter_ids("a stop b")
        for groups in groupings(ids):
            stream = TextStream(TOKENIZER, stop=["stop"])
            shown(stream, groups)
            assert stream.used == len("a stop")

    def test_a_stop_string_ends_the_answer_not_the_reasoning(self):
        stream = TextStream(TOKENIZER, stop=["END"], inside_think=True)
        pieces = shown(stream, [ids_of("no END yet</think>yes END no")])
        assert (text_of(pieces, "reasoning"), text_of(pieces)) == ("no END yet", "yes ")

    def test_neighbours_come_as_one_piece(self):
        pieces = TextStream(TOKENIZER, inside_think=True).feed(ids_of("plan</think>Answer and more"))
        assert pieces == [Piece("plan", "reasoning"), Piece("Answer and more", "answer")]

    def test_random_stops_agree_with_the_whole_text(self):
        source = random.Random(7)
        for _ in range(300):
            text = "".join(source.choices("ab é", k=source.randrange(1, 12)))
            stops = ["".join(source.choices("ab é", k=source.randrange(1, 4))) for _ in range(2)]
            ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
            want = text[: min(ends)[1]] if ends else text
            assert text_of(shown(TextStream(TOKENIZER, stop=stops), [[i] for i in one_letter_ids(text)])) == want


def test_a_named_template_table_uses_its_default():
    inner = SimpleNamespace(chat_template={"default": "D", "tool_use": "T"}, added_tokens_decoder={})
    assert Tokenizer(SimpleNamespace(_tokenizer=inner, eos_token_ids=[]), 8).template == "D"
