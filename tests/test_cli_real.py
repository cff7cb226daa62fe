"""The commands on the real engine, with the small checkpoints: answers, and every refusal as one line."""

import json
import re
import shutil
import socket
from pathlib import Path

import pytest

CHECKPOINTS = Path(__file__).parent / "data" / "checkpoints"
TARGET, DRAFT, OTHER = (str(CHECKPOINTS / name) for name in ("t-hybrid-fp32", "h-d2-slide", "n-d2-slide"))
PAIR = ["--model", TARGET, "--draft", DRAFT]


@pytest.fixture(autouse=True)
def empty_cache_and_no_network(monkeypatch, tmp_path):
    """Give every test a hub cache of its own and let no socket leave the machine."""

    def refuse(*_):
        raise OSError("the network is down")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def broken(tmp_path):
    """Copies of the target for a test to damage."""
    return Path(shutil.copytree(TARGET, tmp_path / "copy"))


def generate(transcript, *args, pair=PAIR):
    return transcript(["generate", "hello", *pair, "--max-tokens", "24", *args])


class TestAnswers:
    def test_the_text_is_the_same_at_every_width(self, transcript):
        texts = {
            generate(transcript, "--temperature", "0", *width)[1]
            for width in ([], ["--block-size", "3"], ["--no-draft"])
        }
        assert len(texts) == 1 and texts.pop().strip()

    def test_a_seed_repeats_an_answer_and_no_seed_does_not(self, transcript):
        def ids(*seed):
            return tuple(json.loads(generate(transcript, "--temperature", "1", "--json", *seed)[1])["tokens"])

        assert ids("--seed", "3") == ids("--seed", "3")
        assert len({ids("--seed", "3"), ids("--seed", "4"), ids(), ids()}) == 4

    def test_json_counts_what_was_delivered(self, transcript):
        for budget in (1, 2, 7, 8, 9, 16):
            told = json.loads(transcript(["generate", "hello", *PAIR, "--json", "--max-tokens", str(budget)])[1])
            assert told["completion_tokens"] == len(told["tokens"]) <= budget
            assert (told["mode"], told["block_size"], len(told["accepted"])) == ("dflash2", 8, told["cycles"])

    def test_the_start_up_line_tells_the_truth(self, transcript):
        assert (
            "t-hybrid-fp32 + h-d2-slide · dflash2, block 3\n" in generate(transcript, "--stats", "--block-size", "3")[2]
        )
        assert "t-hybrid-fp32 · plain decoding\n" in generate(transcript, "--stats", "--no-draft")[2]
        assert "t-hybrid-fp32 · plain decoding\n" in generate(transcript, "--stats", "--block-size", "1")[2]

    def test_a_stop_string_is_not_shown(self, transcript):
        whole = generate(transcript, "--temperature", "0")[1]
        cut = whole.split()[1]
        assert generate(transcript, "--temperature", "0", "--stop", cut)[1].strip() == whole[: whole.index(cut)].strip()

    def test_a_chat_remembers(self, transcript):
        code, _, err = transcript(["chat", *PAIR, "--max-tokens", "8", "--stats"], stdin="hello\nagain\n")
        first, second = map(int, re.findall(r"prompt (\d+) in", err))
        assert code == 0
        assert second > first + 8  # the second prompt holds the first one and its answer

    def test_check_finds_it_lossless(self, transcript):
        code, out, _ = transcript(["check", "hello", "world", *PAIR, "--max-tokens", "24"])
        assert (code, out.splitlines()[-1]) == (0, "2 of 2 lossless")


class TestRefusals:
    def refused(self, transcript, pair, *words, code=1, args=()):
        got = generate(transcript, *args, pair=pair)
        assert (got[0], got[1]) == (code, "")
        assert got[2].count("\n") == 1 and got[2].startswith("dflash-mlx: "), got[2]
        for word in words:
            assert word in got[2]

    def test_a_missing_folder(self, transcript):
        self.refused(transcript, ["--model", "/no/such/folder"], "/no/such/folder", "no such folder")

    def test_a_pair_that_does_not_match(self, transcript):
        self.refused(
            transcript, ["--model", TARGET, "--draft", OTHER], "n-d2-slide", "t-hybrid-fp32", "6 layers against 8"
        )

    def test_a_draft_as_target_and_the_other_way_round(self, transcript):
        self.refused(transcript, ["--model", DRAFT], "is a draft", "--draft")
        self.refused(transcript, ["--model", TARGET, "--draft", TARGET], "not a DFlash draft")

    def test_cut_weights(self, transcript, broken):
        weights = broken / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
        self.refused(transcript, ["--model", str(broken)], "model.safetensors")

    def test_bad_json(self, transcript, broken):
        (broken / "config.json").write_text("{")
        self.refused(transcript, ["--model", str(broken)], "config.json", "JSON")

    def test_a_checkpoint_without_its_tokenizer(self, transcript, broken):
        (broken / "tokenizer.json").unlink()
        self.refused(transcript, ["--model", str(broken)], "tokenizer")

    def test_unknown_names_and_values(self, transcript):
        self.refused(transcript, ["--pair", "huge"], "'huge'", "tiny", code=2)
        self.refused(transcript, [*PAIR, "--pair", "tiny"], "--pair", code=2)
        self.refused(transcript, ["--draft", DRAFT], "--model", code=2)
        self.refused(transcript, [*PAIR, "--draft-bits", "5"], "draft_bits", code=2)
        self.refused(transcript, PAIR, "off, low, medium, xhigh", code=2, args=["--reasoning", "max"])

    def test_prompts_that_cannot_be_answered(self, transcript):
        self.refused(transcript, PAIR, "no reasoning levels", args=["--reasoning", "low"])
        code, _, err = transcript(["generate", " ", *PAIR])
        assert (code, err.splitlines()) == (1, ["dflash-mlx: the prompt is empty"])
        code, _, err = transcript(["generate", "-", *PAIR], stdin="word " * 9000)
        assert (code, err.count("\n")) == (1, 1)
        assert "4096" in err

    def test_speculation_that_cannot_run(self, transcript):
        self.refused(transcript, ["--model", TARGET], "needs a draft", code=2, args=["--block-size", "4"])

    def test_no_network(self, transcript):
        self.refused(transcript, ["--model", "someone/model"], "someone/model", "network")

    def test_an_unwritable_cache(self, transcript, monkeypatch, tmp_path):
        (tmp_path / "file").write_text("in the way")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "file" / "hub"))
        self.refused(transcript, ["--model", "someone/model"], "someone/model")


class TestOthers:
    def test_models_without_a_network(self, transcript):
        code, out, _ = transcript(["models"])
        lines = out.splitlines()
        assert code == 0
        assert lines[0].split() == ["pair", "here", "weights", "memory", "fits", "what", "it", "is"]
        rows = {line.split()[0]: line.split() for line in lines[1:-2]}
        assert rows["flagship"][1:8] == ["no", "16.1", "GB", "+", "3.8", "GB", "16.7"]
        assert "built" in rows["tiny"]
        assert sum(" * " in line for line in lines) == 1

    def test_pull_of_what_is_there(self, transcript):
        code, out, err = transcript(["pull", *PAIR])
        assert (code, err) == (0, "")
        assert out == f"{TARGET}: 2.2 MB in {TARGET}\n{DRAFT}: 1.3 MB in {DRAFT}\n"

    @pytest.mark.parametrize(
        "args, code", [([], 2), (["huge"], 2), (["tiny", "--pair", "flagship"], 2), (["flagship"], 1)]
    )
    def test_pull_that_cannot_work(self, transcript, args, code):
        got = transcript(["pull", *args])
        assert got[:2] == (code, "")
        assert got[2].count("\n") == 1

    def test_doctor_is_one_block(self, transcript):
        code, out, _ = transcript(["doctor"])
        named = dict(line.split("  ", 1) for line in out.splitlines())
        assert code == 0
        assert {name.strip() for name in named} >= {
            "dflash-mlx",
            "installed as",
            "packages",
            "device",
            "memory",
            "kernels",
        }
        assert "this project" in named["installed as"]
