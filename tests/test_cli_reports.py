"""`check`, `bench`, and what all commands share: version, help, exit codes."""

import json

import pytest
from fake_engine import FakeEngine

from dflash_mlx import __version__
from dflash_mlx.cli.render import size, table
from dflash_mlx.lossless import Check

SAME = Check(9, 128)
TIE = Check(9, 128, 30, 11, 12, 0.03125, True)
WRONG = Check(9, 128, 4, 11, 12, 1.5)
SHORT = Check(9, 20, 20)
BANNER = "fake: fake/target + fake/draft · dflash2, block 8\n"


class TestCheck:
    def test_equal_and_tied_prompts_are_lossless(self, transcript):
        engine = FakeEngine(checks=[SAME, TIE])
        assert transcript(["check", "one\nprompt", "b", "--block-size", "4"], engine) == (
            0,
            "equal    128 tokens  one prompt\n"
            "tie  at token 30  b: plain 11 '<11>', speculative 12 '<12>', margin 0.03125\n"
            "2 of 2 lossless\n",
            BANNER,
        )
        asked = engine.asked[0]
        assert (asked["prompts"], asked["block_size"], asked["max_tokens"]) == (["one\nprompt", "b"], 4, 128)

    def test_a_difference_that_is_no_tie_fails(self, transcript):
        code, out, _ = transcript(["check", "a", "long " * 20, "c"], FakeEngine(checks=[SAME, WRONG, SHORT]))
        assert code == 1
        assert "\nDIFFERS  at token 4  long long" in out and "…: plain 11" in out
        assert out.endswith("DIFFERS  at token 20  c: one of the two ends here\n1 of 3 lossless\n")

    def test_built_in_prompts(self, transcript):
        engine = FakeEngine(checks=[SAME] * 5)
        assert transcript(["check"], engine)[1].endswith("5 of 5 lossless\n")

    def test_json(self, transcript):
        code, out, _ = transcript(["check", "a", "b", "--json"], FakeEngine(checks=[SAME, WRONG]))
        found = json.loads(out)
        assert (code, found["lossless"], found["checks"][1]["speculative_id"]) == (1, False, 12)

    @pytest.mark.parametrize("command", ["check", "bench"])
    def test_plain_decoding_has_nothing_to_compare(self, transcript, command):
        code, _, err = transcript([command], FakeEngine(plan=("plain", 1, None)))
        assert code == 2
        assert "nothing to compare" in err


class TestBench:
    def test_both_ways_alternate_after_a_warm_up(self, transcript):
        engine = FakeEngine(*[["a", "b"]] * 10)
        code, out, _ = transcript(["bench", "one", "--repeats", "2", "--max-tokens", "16"], engine)
        assert code == 0
        ways = [asked["speculate"] for asked in engine.asked]
        assert ways == [False, True, False, True, False, True, False, True, False, True]
        assert [asked["max_tokens"] for asked in engine.asked] == [8, 8] + [16] * 8
        assert [asked.get("sampling").temperature for asked in engine.asked[2:]] == [0.0] * 4 + [0.7] * 4
        assert out.splitlines()[1].split() == ["0", "4.0", "4.0", "1.00x", "1.50", "one"]
        assert out.endswith("temperature 0.7: 1.00x, plain is faster\n")

    def test_json(self, transcript):
        out = transcript(["bench", "one", "--repeats", "1", "--json"], FakeEngine(*[["a", "b"]] * 6))[1]
        told = json.loads(out)
        assert (told["model"], told["draft"], told["repeats"]) == ("fake/target", "fake/draft", 1)
        assert [(row["temperature"], row["ratio"], row["equal"]) for row in told["results"]] == [
            (0.0, 1.0, True), (0.7, 1.0, None),
        ]  # fmt: skip

    def test_an_answer_that_differs_is_told(self, transcript):
        engine = FakeEngine(["a"], ["a"], ["a", "b"], ["a"], ["a"], ["a"])
        out = transcript(["bench", "one", "--repeats", "1"], engine)[1]
        assert out.endswith("1 greedy answers differ from plain decoding; `dflash-mlx check` tells why\n")


class TestShared:
    def test_version(self, transcript):
        assert transcript(["--version"]) == (0, f"dflash-mlx {__version__}\n", "")

    def test_no_arguments_show_the_help(self, transcript):
        assert transcript([]) == transcript(["--help"])
        assert transcript([])[0] == 0

    @pytest.mark.parametrize("args", [["bogus"], ["--bogus"], ["pull", "--bogus"], ["bench", "--repeats", "0"]])
    def test_usage_errors_are_one_line(self, transcript, args):
        code, out, err = transcript(args)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith("dflash-mlx: ") and "--help)" in err


class TestTables:
    ROWS = [("name", "size"), ("long name here", "1 GB"), ("x", "")]

    def test_columns_line_up(self):
        assert table(self.ROWS, 80) == "name            size\nlong name here  1 GB\nx"

    def test_the_last_column_is_cut_to_the_terminal(self):
        lines = table([("a", "prompt"), ("b", "word " * 10)], 30).splitlines()
        assert lines == ["a  prompt", "b  " + ("word " * 10)[:26] + "…"]

    def test_a_narrow_terminal_gets_cells_below_each_other(self):
        assert table(self.ROWS, 19) == "name  long name here\nsize  1 GB\n\nname  x"

    @pytest.mark.parametrize("count, text", [(0, "0.0 MB"), (999_000_000, "999.0 MB"), (16_054_541_349, "16.1 GB")])
    def test_sizes(self, count, text):
        assert size(count) == text
