"""Values that checkpoints, machines and callers get wrong: one line each, and before anything is computed."""

import io
import json
import os
import shutil
import subprocess
import sys

import pytest
from pairs import CHECKPOINTS, config_of

import dflash_mlx
from dflash_mlx.bench.compare import Result
from dflash_mlx.cli.bench import report
from dflash_mlx.cli.main import main
from dflash_mlx.errors import CheckpointError, OptionError, PromptError
from dflash_mlx.models import DraftConfig, TargetConfig

TARGET, DRAFT = "t-hybrid-fp32", "h-d2-slide"
WRONG_TARGET = [
    ("text_config", "x"), ("text_config", [1]), ("quantization", 3), ("quantization", {"bits": "x"}),
    ("eos_token_id", [[1]]), ("eos_token_id", 1.5),
]  # fmt: skip
WRONG_DRAFT = [
    ("dflash_config", 3), ("dflash_config", [1]), ("rope_parameters", 3), ("rms_norm_eps", 10**400),
    ("rms_norm_eps", float("nan")), ("intermediate_size", 10**14), ("rope_theta", 0), ("rope_theta", "x"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_on_stdin(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO())


@pytest.mark.parametrize("key, value", WRONG_TARGET)
def test_target_configs_of_the_wrong_kind(key, value):
    with pytest.raises(CheckpointError, match="a/target"):
        TargetConfig.from_json(config_of(TARGET) | {key: value}, "a/target")


@pytest.mark.parametrize("key, value", WRONG_DRAFT)
def test_draft_configs_of_the_wrong_kind(key, value):
    with pytest.raises(CheckpointError, match="a/draft"):
        DraftConfig.from_json(config_of(DRAFT) | {key: value}, "a/draft")


@pytest.mark.parametrize("taps", [["a"], [[1]]])
def test_draft_taps_of_the_wrong_kind(taps):
    config = config_of(DRAFT)
    config["dflash_config"]["target_layer_ids"] = taps
    with pytest.raises(CheckpointError, match="target_layer_ids"):
        DraftConfig.from_json(config, "a/draft")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' + "9" * 5000 + "}", "{", "[1]"])
def test_config_files_beyond_reading(tmp_path, capsys, text):
    shutil.copytree(CHECKPOINTS / TARGET, tmp_path / "bad")
    (tmp_path / "bad" / "config.json").write_text(text)
    assert main(["generate", "hi", "--model", str(tmp_path / "bad")]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "config.json" in err


@pytest.mark.parametrize("offsets", [[0, 4, 8], ["a", 4], [8, 4], None])
def test_weight_headers_with_odd_offsets(tmp_path, capsys, offsets):
    shutil.copytree(CHECKPOINTS / TARGET, tmp_path / "bad")
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": offsets}}).encode()
    (tmp_path / "bad" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    assert main(["generate", "hi", "--model", str(tmp_path / "bad")]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "model.safetensors" in err


@pytest.mark.parametrize("template", ["{{ 1/0 }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"])
def test_templates_that_fail(tmp_path, capsys, template):
    shutil.copytree(CHECKPOINTS / TARGET, tmp_path / "bad")
    (tmp_path / "bad" / "chat_template.jinja").write_text(template)
    assert main(["generate", "hi", "--model", str(tmp_path / "bad")]) == 1
    err = capsys.readouterr().err.splitlines()
    assert "the chat template refused" in err[-1]


def test_a_closed_stdin_is_like_an_empty_one():
    command = [sys.executable, "-m", "dflash_mlx", "generate", "--pair", "tiny", "--max-tokens", "2", "hi"]
    run = subprocess.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", *command], capture_output=True, env=dict(os.environ), check=False
    )
    assert run.returncode == 0 and run.stdout, run.stderr


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("[metal] out of memory")])
def test_a_machine_that_gives_out_ends_in_one_line(capsys, error):
    def engine():
        raise error

    assert main(["generate", "hi"], engine=engine) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "out of memory" in err


def test_answers_too_short_to_time_are_said_to_be():
    result = Result("hi", 0.0, 1, 0.0, 0.0, 0.0, True)
    assert "too short to be timed" in report([result], 80)


@pytest.fixture(scope="module")
def pair():
    return dflash_mlx.load(model=str(CHECKPOINTS / TARGET), draft=str(CHECKPOINTS / DRAFT))


class TestApi:
    @pytest.mark.parametrize(
        "setting", [{"sampling": None}, {"sampling": 0.7}, {"stop": None}, {"stop": 3}, {"block_cap": "no"},
                    {"speculate": 1}, {"max_tokens": -1}, {"block_size": 0}, {"denoise_steps": 0}, {"stop": ""}],
    )  # fmt: skip
    def test_settings_are_refused_before_the_stream_begins(self, pair, setting):
        with pytest.raises(OptionError, match=next(iter(setting))):
            dflash_mlx.stream("hi", pair=pair, **setting)

    def test_unknown_settings_are_refused(self, pair):
        with pytest.raises(TypeError, match="blocksize"):
            dflash_mlx.stream("hi", pair=pair, blocksize=3)

    def test_prompts_at_the_end_of_the_context(self, pair):
        limit = pair.target_config.context_length
        with pytest.raises(PromptError, match=f"{limit} tokens"):
            dflash_mlx.stream([5] * limit, pair=pair)
        made = dflash_mlx.generate([5] * (limit - 2), pair=pair, max_tokens=10)
        assert len(made.tokens) == 2 and made.finish_reason == "length"

    def test_any_number_of_denoise_steps_ends(self, pair):
        few, many = (dflash_mlx.generate("hi", pair=pair, max_tokens=8, denoise_steps=n) for n in (7, 10**9))
        assert few.tokens == many.tokens
