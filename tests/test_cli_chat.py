"""`dflash-mlx chat`: whole transcripts."""

import pytest
from conftest import Terminal
from fake_engine import FakeEngine

from dflash_mlx.errors import PromptError

USER = lambda text: {"role": "user", "content": text}  # noqa: E731
SAID = lambda text, **more: {"role": "assistant", "content": text, **more}  # noqa: E731


HINT = "/help lists the commands, Ctrl-C ends an answer, Ctrl-D leaves\n"


class Keyboard(Terminal):
    """A terminal that also plays interrupts: a line of `^C` is one."""

    def readline(self, *args):
        line = super().readline(*args)
        if line == "^C\n":
            raise KeyboardInterrupt
        return line


def test_a_conversation_in_a_pipe(transcript):
    engine = FakeEngine(["Hello", " Ann."], ["Ann, as you said."])
    assert transcript(["chat", "--system", "be brief"], engine, stdin="I am Ann\n\nWho am I?\n/exit\nnever read\n") == (
        0, "Hello Ann.\nAnn, as you said.\n", "",
    )  # fmt: skip
    assert [asked["prompt"] for asked in engine.asked] == [
        [USER("I am Ann")],
        [USER("I am Ann"), SAID("Hello Ann."), USER("Who am I?")],
    ]
    assert {asked["system"] for asked in engine.asked} == {"be brief"}


def test_the_same_at_a_keyboard(transcript):
    engine = FakeEngine(["Hello."])
    code, out, err = transcript(["chat"], engine, stdin=Keyboard("hi\n"), out_tty=True, err_tty=True)
    assert (code, out) == (0, "> Hello.\n> ")
    assert err == "\r\x1b[Kloading …\r\x1b[Kfake: fake/target + fake/draft · dflash2, block 8\n" + HINT + "\n"


def test_prompts_stay_out_of_a_redirected_answer(transcript):
    code, out, err = transcript(["chat"], FakeEngine(["Hello."]), stdin=Keyboard("hi\n"))
    assert (code, out, err) == (0, "Hello.\n", f"{HINT}> > \n")


def test_reasoning_goes_back_as_its_own_field(transcript):
    engine = FakeEngine([("reasoning", "hm"), "One."], ["Two."])
    transcript(["chat"], engine, stdin="a\nb\n")
    assert engine.asked[1]["prompt"][1] == SAID("One.", reasoning_content="hm")


def test_several_lines_between_triple_quotes_are_one_message(transcript):
    engine = FakeEngine(["1"], ["2"], ["3"])
    transcript(["chat"], engine, stdin='"""\ndef f():\n    return 1\n"""\n"""one line"""\n"""never\nclosed')
    assert [asked["prompt"][-1]["content"] for asked in engine.asked] == [
        "def f():\n    return 1",
        "one line",
        "never\nclosed",
    ]


def test_help_lists_every_command_and_key(transcript):
    assert transcript(["chat"], FakeEngine(), stdin="/help\n")[2] == (
        "/help    show this list\n"
        "/reset   forget what was said, but not the system message\n"
        "/stats   show how the answers ran\n"
        "/exit    leave\n"
        '"""      begin and end a message of several lines\n'
        "Ctrl-C   end the answer only\n"
        "Ctrl-D   leave\n"
    )


def test_reset_forgets(transcript):
    engine = FakeEngine(["1"], ["2"])
    assert transcript(["chat"], engine, stdin="a\n/reset\nb\n")[2] == "the conversation is empty again\n"
    assert engine.asked[1]["prompt"] == [USER("b")]


def test_stats_of_the_answer_and_of_the_chat(transcript):
    err = transcript(["chat"], FakeEngine(["a", "b"], ["c"]), stdin="/stats\nx\ny\n/st\n")[2].splitlines()
    assert err[:2] == ["fake: fake/target + fake/draft · dflash2, block 8", "no answer yet"]
    assert err[3].startswith("last answer: 1 tokens in 0.50 s (4.0 tokens/s)")
    assert err[4] == "since the start: 2 answers, 3 tokens in 1.00 s"


@pytest.mark.parametrize(
    "typed, said",
    [
        ("/e", ""),
        ("/EXIT  ", ""),
        ("/nothing", "there is no /nothing; /help lists what there is\n"),
        ("/", "/ could be /help or /reset or /stats or /exit\n"),
    ],
)
def test_commands_by_unique_beginning(transcript, typed, said):
    assert transcript(["chat"], FakeEngine(), stdin=f"{typed}\n/exit\n") == (0, "", said)


def test_a_path_is_a_message(transcript):
    engine = FakeEngine(["1"])
    transcript(["chat"], engine, stdin="/usr/bin/python fails\n")
    assert engine.asked[0]["prompt"] == [USER("/usr/bin/python fails")]


class TestInterrupts:
    def test_it_ends_the_answer_which_stays_as_far_as_it_came(self, transcript):
        engine = FakeEngine(["so", " far", KeyboardInterrupt()], ["next"])
        code, out, err = transcript(["chat"], engine, stdin="a\nb\n")
        assert (code, out, err) == (0, "so far\nnext\n", "(stopped; the part above stays in the conversation)\n")
        assert engine.asked[1]["prompt"] == [USER("a"), SAID("so far"), USER("b")]
        assert engine.closed == 2

    def test_before_the_first_word_the_message_is_dropped(self, transcript):
        engine = FakeEngine([KeyboardInterrupt()], ["next"])
        err = transcript(["chat"], engine, stdin="a\nb\n")[2]
        assert err == "(stopped; the message is dropped, nothing was answered yet)\n"
        assert engine.asked[1]["prompt"] == [USER("b")]

    def test_at_the_prompt_the_second_one_leaves(self, transcript):
        engine = FakeEngine(["1"])
        code, _, err = transcript(["chat"], engine, stdin=Keyboard("^C\na\n^C\n^C\nnever\n"), out_tty=True)
        assert (code, len(engine.asked)) == (130, 1)
        assert err.count("(Ctrl-C again or Ctrl-D leaves)") == 2


class TestRefusals:
    def test_a_refused_message_leaves_the_conversation_as_it_was(self, transcript):
        engine = FakeEngine(["1"], [PromptError("too long")], ["3"])
        code, out, err = transcript(["chat"], engine, stdin=Keyboard("a\nb\nc\n"))
        assert (code, out) == (0, "1\n3\n")
        assert "dflash-mlx: too long\n" in err
        assert engine.asked[2]["prompt"] == [USER("a"), SAID("1"), USER("c")]

    def test_in_a_pipe_it_ends_the_chat(self, transcript):
        engine = FakeEngine([PromptError("too long")], ["never"])
        assert transcript(["chat"], engine, stdin="a\nb\n") == (1, "", "dflash-mlx: too long\n")

    def test_bad_options_are_refused_before_loading(self, transcript):
        engine = FakeEngine()
        assert transcript(["chat", "--top-p", "7"], engine)[0] == 2
        assert engine.loaded == []


def test_stats_after_every_answer(transcript):
    err = transcript(["chat", "--stats"], FakeEngine(["1"], ["2"]), stdin="a\nb\n")[2]
    assert err.count("tokens/s") == 2


def test_every_answer_that_was_cut_off_says_so(transcript):
    engine = FakeEngine(["1"], ["2"], finish="length")
    err = transcript(["chat", "--max-tokens", "1"], engine, stdin="a\nb\n")[2]
    assert err == "note: cut off after 1 token, see --max-tokens\n" * 2
