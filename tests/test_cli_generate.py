"""`dflash-mlx generate`: what reaches the engine, and what reaches stdout and stderr."""

import io
import json

import pytest
from conftest import Terminal
from fake_engine import FakeEngine

from dflash_mlx.errors import CheckpointError, PairError, PromptError, ResourceError
from dflash_mlx.types import Cycle, Sampling

ANSWER = ["Hel", "lo ", "👋"]
PLAIN = "Hello 👋\n"


class TestStreams:
    def test_a_pipe_gets_the_text_and_nothing_else(self, transcript):
        engine = FakeEngine(ANSWER)
        assert transcript(["generate", "hi"], engine) == (0, PLAIN, "")
        assert engine.closed == 1

    def test_a_terminal_gets_the_start_up_line(self, transcript):
        code, out, err = transcript(["generate", "hi"], FakeEngine(ANSWER), out_tty=True, err_tty=True)
        assert (code, out) == (0, PLAIN)
        assert err == "\r\x1b[Kloading …\r\x1b[Kfake: fake/target + fake/draft · dflash2, block 8\n"

    def test_stats_go_to_stderr(self, transcript):
        code, out, err = transcript(["generate", "hi", "--stats", "--seed", "7"], FakeEngine(ANSWER))
        assert (code, out) == (0, PLAIN)
        assert err == (
            "fake: fake/target + fake/draft · dflash2, block 8\n"
            "3 tokens in 0.50 s (4.0 tokens/s) · prompt 5 in 0.25 s · tau 1.50 in 2 cycles · dflash2, block 8 · "
            "seed 7 · peak 1.5 GB · ended by stop\n"
        )

    def test_plain_decoding_names_no_draft(self, transcript):
        engine = FakeEngine(ANSWER, plan=("plain", 1, None))
        assert transcript(["generate", "hi", "--stats"], engine)[2].startswith("fake: fake/target · plain decoding\n")

    @pytest.mark.parametrize("tty", [True, False])
    def test_notices_come_once_and_leave_the_answer_whole(self, transcript, tty):
        parked = Cycle((1,), (2,), 0, 0.1, notice="draft parked")
        engine = FakeEngine(["half", parked, " line"], plan=("dflash2", 5, "block lowered"), notices=("loaded",))
        assert transcript(["generate", "hi"], engine, out_tty=tty) == (
            0, "half line\n", "note: loaded\nnote: block lowered\nnote: draft parked\n",
        )  # fmt: skip

    def test_an_answer_that_was_cut_off_says_so(self, transcript):
        assert transcript(["generate", "hi", "--max-tokens", "3"], FakeEngine(ANSWER, finish="length"))[2] == (
            "note: cut off after 3 tokens, see --max-tokens\n"
        )
        assert "context is full" in transcript(["generate", "hi"], FakeEngine(ANSWER, finish="length"))[2]

    def test_a_text_that_ends_its_line_gets_no_second_end(self, transcript):
        assert transcript(["generate", "hi"], FakeEngine(["done\n"]))[1] == "done\n"
        assert transcript(["generate", "hi"], FakeEngine([]))[1] == ""

    def test_escape_codes_of_a_model_do_not_reach_a_terminal(self, transcript):
        answer = ["a\x1b[2Jb\rc\td\x9b1me"]
        assert transcript(["generate", "hi"], FakeEngine(answer), out_tty=True)[1] == "a[2Jbc\td1me\n"
        assert transcript(["generate", "hi"], FakeEngine(answer))[1] == answer[0] + "\n"


class TestReasoning:
    ANSWER = [("reasoning", "let me "), ("reasoning", "see"), "Yes."]

    def test_it_is_dimmed_and_apart_on_a_terminal(self, transcript):
        out = transcript(["generate", "hi"], FakeEngine(self.ANSWER), out_tty=True)[1]
        assert out == "\x1b[2mlet me see\x1b[0m\n\nYes.\n"

    def test_it_goes_to_stderr_when_stdout_is_a_pipe(self, transcript):
        assert transcript(["generate", "hi"], FakeEngine(self.ANSWER)) == (0, "Yes.\n", "let me see\n")

    @pytest.mark.parametrize("name, value", [("NO_COLOR", "1"), ("TERM", "dumb")])
    def test_without_colour_marks_keep_it_apart(self, transcript, monkeypatch, name, value):
        monkeypatch.setenv(name, value)
        out = transcript(["generate", "hi"], FakeEngine(self.ANSWER), out_tty=True)[1]
        assert out == "[reasoning]\nlet me see\n[answer]\nYes.\n"

    def test_colour_ends_with_an_unfinished_reasoning(self, transcript):
        code, out, _ = transcript(
            ["generate", "hi"], FakeEngine([("reasoning", "hm"), KeyboardInterrupt()]), out_tty=True
        )
        assert (code, out) == (130, "\x1b[2mhm\x1b[0m\n")

    def test_the_level_reaches_the_engine_and_chooses_the_sampling(self, transcript):
        engine = FakeEngine(ANSWER, ANSWER)
        transcript(["generate", "hi", "--reasoning", "off"], engine)
        transcript(["generate", "hi", "--reasoning", "low"], engine)
        assert [(asked["reasoning"], asked["sampling"].temperature) for asked in engine.asked] == [
            ("off", 0.3),
            ("low", 0.7),
        ]


class TestJson:
    def test_one_object_with_every_key(self, transcript):
        code, out, err = transcript(
            ["generate", "hi", "--json", "--seed", "3"], FakeEngine([("reasoning", "hm"), "Hé"])
        )
        assert (code, err, out.count("\n")) == (0, "", 1)
        assert "é" in out
        assert json.loads(out) == {
            "text": "Hé", "reasoning": "hm", "tokens": [0, 1], "finish_reason": "stop", "prompt_tokens": 5,
            "completion_tokens": 2, "cycles": 2, "drafted": [7], "accepted": [2], "tau": 1.5, "block_size": 8,
            "mode": "dflash2", "seed": 3, "prefill_s": 0.25, "decode_s": 0.5, "tokens_per_s": 4.0,
            "peak_bytes": 1500000000, "model": "fake/target", "draft": "fake/draft", "revision": "abc", "notices": [],
        }  # fmt: skip

    def test_a_refusal_leaves_stdout_empty(self, transcript):
        refused = FakeEngine(refuse=PairError("a is no draft for b"))
        assert transcript(["generate", "hi", "--json"], refused) == (1, "", "dflash-mlx: a is no draft for b\n")


class TestPrompt:
    @pytest.mark.parametrize(
        "args, stdin, prompt",
        [
            (["hi"], "", "hi"),
            (["-"], "from a pipe\n", "from a pipe\n"),
            ([], "from a pipe", "from a pipe"),
            (["explain"], "the log", "explain\n\nthe log"),
            (["explain"], "  \n", "explain"),
        ],
    )
    def test_argument_and_pipe(self, transcript, args, stdin, prompt):
        engine = FakeEngine(ANSWER)
        assert transcript(["generate", *args], engine, stdin=stdin)[0] == 0
        assert engine.asked[0]["prompt"] == prompt

    def test_files_come_first_and_keep_their_fences_apart(self, transcript, tmp_path):
        (tmp_path / "a.py").write_text("print('é')\n", encoding="utf-8")
        (tmp_path / "b.md").write_text("```\ncode\n```", encoding="utf-8")
        engine = FakeEngine(ANSWER)
        files = ["--file", str(tmp_path / "a.py"), "--file", str(tmp_path / "b.md")]
        transcript(["generate", *files, "review", "--system", "be brief"], engine)
        assert engine.asked[0]["prompt"] == (
            "a.py:\n```\nprint('é')\n```\n\nb.md:\n````\n```\ncode\n```\n````\n\nreview"
        )  # fmt: skip
        assert engine.asked[0]["system"] == "be brief"

    def test_a_keyboard_is_not_waited_for(self, transcript):
        code, out, err = transcript(["generate"], FakeEngine(), stdin=Terminal())
        assert (code, out) == (2, "")
        assert err == "dflash-mlx: give a prompt, or pipe one in\n"

    @pytest.mark.parametrize("stdin", ["", " \n"])
    def test_an_empty_pipe_is_refused_before_loading(self, transcript, stdin):
        engine = FakeEngine()
        code, _, err = transcript(["generate"], engine, stdin=stdin)
        assert (code, err.count("\n"), engine.loaded) == (1, 1, [])

    def test_input_that_is_no_text(self, transcript, tmp_path):
        binary = io.TextIOWrapper(io.BytesIO(b"\xff\xfe\x00"), encoding="utf-8")
        assert transcript(["generate", "-"], FakeEngine(), stdin=binary)[::2] == (
            1, "dflash-mlx: what came through the pipe is not UTF-8 text\n",
        )  # fmt: skip
        (tmp_path / "x").write_bytes(b"\xff\xfe")
        code, _, err = transcript(["generate", "hi", "--file", str(tmp_path / "x")], FakeEngine())
        assert (code, err) == (1, f"dflash-mlx: {tmp_path}/x is not UTF-8 text\n")


class TestOptions:
    def test_every_option_reaches_the_engine(self, transcript):
        engine = FakeEngine(ANSWER)
        args = (
            "generate hi --temperature 0.5 --top-p 0.8 --top-k 20 --min-p 0.1 --seed 3 --max-tokens 9 --block-size 4 "
            "--no-block-cap --denoise-steps 2 --stop END --stop FIN --raw --model m/t --draft m/d --revision r "
            "--draft-revision q --draft-bits 4"
        )
        assert transcript(args.split(), engine)[0] == 0
        asked, loaded = engine.asked[0], engine.loaded[0]
        assert loaded.pop("progress")
        assert loaded == {
            "pair": None, "model": "m/t", "draft": "m/d", "revision": "r", "draft_revision": "q", "draft_bits": 4,
            "speculate": True,
        }  # fmt: skip
        assert asked == {
            "prompt": "hi", "pair": engine.pair, "sampling": Sampling(0.5, 0.8, 20, 0.1, 3), "max_tokens": 9,
            "block_size": 4, "block_cap": False, "speculate": True, "denoise_steps": 2, "stop": ("END", "FIN"),
            "raw": True, "system": None, "reasoning": None,
        }  # fmt: skip
        assert engine.planned == {"block_size": 4, "block_cap": False, "speculate": True}

    def test_the_pairs_sampling_holds_where_nothing_is_said(self, transcript):
        engine = FakeEngine(ANSWER)
        transcript(["generate", "hi", "--temperature", "0", "--pair", "tiny", "--no-draft"], engine)
        assert engine.asked[0]["sampling"] == Sampling(temperature=0.0, top_p=0.9)
        assert engine.asked[0]["speculate"] is False
        assert (engine.loaded[0]["pair"], engine.loaded[0]["speculate"]) == ("tiny", False)

    @pytest.mark.parametrize(
        "args, words",
        [
            (["--temperature", "-1"], "temperature must be between 0 and 100, not -1"),
            (["--temperature", "warm"], "'--temperature'"),
            (["--top-p", "1.5"], "top_p"),
            (["--top-k", "-1"], "top_k"),
            (["--min-p", "nan"], "min_p"),
            (["--seed", "-3"], "seed"),
            (["--max-tokens", "-1"], "max_tokens"),
            (["--block-size", "0"], "block_size"),
            (["--denoise-steps", "0"], "denoise_steps"),
            (["--stop", ""], "stop"),
            (["--nonsense"], "--nonsense"),
            (["second prompt"], "second prompt"),
            (["--file"], "--file"),
        ],
    )
    def test_a_value_that_can_never_work_is_a_usage_error_before_loading(self, transcript, args, words):
        engine = FakeEngine(ANSWER)
        code, out, err = transcript(["generate", "hi", *args], engine)
        assert (code, out, engine.loaded) == (2, "", [])
        assert err.startswith("dflash-mlx: ") and words in err and err.count("\n") == 1


class TestRefusals:
    @pytest.mark.parametrize(
        "error",
        [
            PairError("x is no draft for y: hidden size 1 against 2"),
            CheckpointError("x: no such folder"),
            ResourceError("x needs\n20 GB"),
            PermissionError(13, "Permission denied", "/cache"),
            OSError(28, "No space left on device"),
        ],
    )
    def test_one_line_and_code_1_while_loading(self, transcript, error):
        code, out, err = transcript(["generate", "hi"], FakeEngine(refuse=error))
        assert (code, out) == (1, "")
        assert err == f"dflash-mlx: {' '.join(str(error).split())}\n"

    def test_a_refused_prompt(self, transcript):
        assert transcript(["generate", "hi"], FakeEngine([PromptError("too long")])) == (
            1,
            "",
            "dflash-mlx: too long\n",
        )

    def test_a_missing_file(self, transcript, tmp_path):
        code, _, err = transcript(["generate", "hi", "--file", str(tmp_path / "no")], FakeEngine())
        assert (code, err) == (1, f"dflash-mlx: {tmp_path}/no cannot be read: No such file or directory\n")

    def test_a_failure_amid_the_answer_keeps_what_was_said(self, transcript):
        assert transcript(["generate", "hi"], FakeEngine(["so far", ResourceError("out of memory")])) == (
            1, "so far\n", "dflash-mlx: out of memory\n",
        )  # fmt: skip

    def test_an_interrupt_keeps_what_was_said(self, transcript):
        engine = FakeEngine(["so far", KeyboardInterrupt()])
        assert transcript(["generate", "hi"], engine) == (130, "so far\n", "")
        assert engine.closed == 1
