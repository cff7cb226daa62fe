"""Folders to a checked pair: what loads, and how each thing that cannot work is refused."""

import json
import shutil
import socket
import struct
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from dflash_mlx import fit
from dflash_mlx.errors import CheckpointError, OptionError, PairError, ResourceError
from dflash_mlx.loading import load
from dflash_mlx.models.config import DraftConfig, Reader

DATA = Path(__file__).parent / "data" / "checkpoints"
TARGET, DRAFT = DATA / "t-hybrid-fp32", DATA / "h-d2-slide"


def copied(source, folder, *, config=None, nested=None, drop=(), only=None):
    """Copy a checkpoint with changes to its config.json; a value of None removes the key."""
    shutil.copytree(source, folder, copy_function=shutil.copy)
    for file in folder.iterdir():
        if file.name in drop or (only and file.name not in only):
            file.unlink()
    values = json.loads((folder / "config.json").read_text())
    for place, changes in ((values, config or {}), (values.get("dflash_config", {}), nested or {})):
        place.update(changes)
        for key in [key for key, value in changes.items() if value is None]:
            del place[key]
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def refusal(kind, **options):
    """Load, expect `kind`, and return its message, which must be one line."""
    with pytest.raises(kind) as caught:
        load(**{"model": str(TARGET)} | {key: str(value) for key, value in options.items()})
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def no_sockets(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def tensors(folder):
    """Read a checkpoint's arrays in full, so that its file may be written anew."""
    arrays = mx.load(str(folder / "model.safetensors"))
    mx.eval(arrays)
    return arrays


def logits(pair):
    ids = mx.array([[1, 7, 30, 100, 5]])
    return np.array(pair.target.unembed(pair.target.forward(ids, pair.target.new_state()).hidden))


class TestLoading:
    def test_two_folders_are_a_pair_without_a_socket(self, no_sockets):
        pair = load(model=str(TARGET), draft=str(DRAFT))
        assert pair.model_id == str(TARGET) and pair.draft_id == str(DRAFT) and pair.revision is None
        assert pair.target_config.family == "qwen3_5" and pair.draft_config.version == 2
        assert pair.stop_ids == {510, 508} and pair.notices == ()
        assert pair.tokenizer.decode(pair.tokenizer.encode_prompt("lorem", raw=True)) == "lorem"

    def test_without_a_draft_it_decodes_plainly_and_says_so(self):
        pair = load(model=str(TARGET))
        assert pair.draft is None and "plain decoding" in pair.notices[0]
        assert load(model=str(TARGET), draft=str(DRAFT), speculate=False).draft is None

    def test_generation_config_wins_over_the_config_for_stop_ids(self, tmp_path):
        home = copied(TARGET, tmp_path / "t", config={"eos_token_id": 3})
        (home / "generation_config.json").write_text('{"eos_token_id": [510, 7]}')
        pair = load(model=str(home))
        assert pair.target_config.eos_ids == (510, 7) and pair.stop_ids == {510, 7}

    def test_the_tokenizer_s_own_end_token_stops_too(self, tmp_path):
        """Conversions may keep the base model's end of text in config.json, and the end of a turn in the tokenizer."""
        home = copied(TARGET, tmp_path / "t", config={"eos_token_id": 3}, nested={})
        values = json.loads((home / "config.json").read_text())
        values["text_config"]["eos_token_id"] = 3
        (home / "config.json").write_text(json.dumps(values))
        pair = load(model=str(home))
        assert pair.tokenizer.decode([510], special=True) == "<|im_end|>" and pair.stop_ids == {3, 510}

    def test_a_tensor_of_a_native_predictor_changes_nothing(self, tmp_path):
        home = copied(TARGET, tmp_path / "t")
        arrays = tensors(home)
        arrays["language_model.mtp.fc.weight"] = mx.ones((64, 128))
        arrays["mtp.norm.weight"] = mx.ones((64,))
        mx.save_safetensors(str(home / "model.safetensors"), arrays)
        assert np.array_equal(logits(load(model=str(home))), logits(load(model=str(TARGET))))

    @pytest.mark.parametrize("bits", [4, 8])
    def test_draft_bits_quantize_the_draft_alone(self, bits):
        pair = load(model=str(TARGET), draft=str(DRAFT), draft_bits=bits, widen=False)
        kinds = (nn.QuantizedLinear, nn.QuantizedEmbedding)
        found = [module for module in pair.draft.modules() if isinstance(module, kinds)]
        assert found and {module.bits for module in found} == {bits}
        assert not any(isinstance(module, kinds) for module in pair.target.model.modules())

    def test_codebooks_load_under_either_name_and_must_be_there(self, tmp_path):
        arrays = tensors(DRAFT)
        names = [name for name in arrays if name.endswith("_codebook")]
        assert len(names) == 2
        home = copied(DRAFT, tmp_path / "d")
        renamed = {f"{name}.weight" if name in names else name: array for name, array in arrays.items()}
        mx.save_safetensors(str(home / "model.safetensors"), renamed)
        ours = dict(tree_flatten(load(model=str(TARGET), draft=str(home)).draft.parameters()))
        theirs = dict(tree_flatten(load(model=str(TARGET), draft=str(DRAFT)).draft.parameters()))
        assert ours.keys() == theirs.keys() and all(mx.array_equal(ours[name], theirs[name]) for name in ours)
        bare = {name: array for name, array in arrays.items() if name not in names}
        mx.save_safetensors(str(home / "model.safetensors"), bare)
        assert "lacks 2 tensors (candidate_selector.predecessor_codebook" in refusal(CheckpointError, draft=home)

    def test_small_quantized_weights_run_dense_on_a_cpu_and_say_so(self):
        source = DATA / "t-hybrid-4bit"
        before = mx.default_device()
        mx.set_default_device(mx.cpu)
        wide, stored = load(model=str(source)), load(model=str(source), widen=False)
        mx.set_default_device(before)
        assert any("4-bit weights run as dense ones" in notice for notice in wide.notices)
        assert wide.target_config.bits == 4, "the block cap goes by what is stored"
        packed = stored.target.body.layers[0].mlp.up_proj
        dense = mx.dequantize(packed.weight, packed.scales, packed.biases, packed.group_size, packed.bits)
        assert mx.array_equal(wide.target.body.layers[0].mlp.up_proj.weight, dense)
        assert not any(isinstance(module, nn.QuantizedLinear) for module in wide.target.model.modules())

    def test_an_unquantized_draft_beside_a_quantized_target_is_noticed(self):
        pair = load(model=str(DATA / "t-hybrid-4bit"), draft=str(DRAFT), widen=False)
        assert any("runs unquantized beside a 4-bit target" in notice for notice in pair.notices)
        assert load(model=str(DATA / "t-hybrid-4bit"), draft=str(DRAFT), draft_bits=4, widen=False).notices == ()


class TestWrongPairs:
    """Each draft folder holds config.json alone: the refusal comes before any weight is looked for."""

    @pytest.mark.parametrize(
        "config, nested, differs",
        [
            ({"hidden_size": 128}, {}, "hidden size 128 against 64"),
            ({"num_target_layers": 36}, {}, "made for 36 layers against 8"),
            ({"num_target_layers": None}, {"target_layer_ids": [1, 12]}, "taps up to layer 12 against layers 0 to 7"),
            ({"vocab_size": 600}, {}, "vocabulary 600 against 512"),
            ({}, {"mask_token_id": 510}, "mask token 510, which the target stops at"),
            ({"eos_token_id": 2}, {}, "end token 2 against special tokens 508, 510"),
        ],
    )
    def test_both_models_and_the_difference_are_named(self, tmp_path, config, nested, differs):
        draft = copied(DRAFT, tmp_path / "d", config=config, nested=nested, only=["config.json"])
        assert refusal(PairError, draft=draft) == f"{draft} is no draft for {TARGET}: {differs}"

    def test_all_differences_are_listed(self, tmp_path):
        changes = {"hidden_size": 128, "vocab_size": 600, "num_target_layers": 36}
        message = refusal(PairError, draft=copied(DRAFT, tmp_path / "d", config=changes, only=["config.json"]))
        assert all(part in message for part in ("hidden size 128", "made for 36", "vocabulary 600"))

    def test_a_draft_is_no_target(self):
        assert (
            refusal(CheckpointError, model=DRAFT) == f"{DRAFT} is a draft, not a target; pass it as the draft (--draft)"
        )

    def test_a_target_is_no_draft(self):
        assert f"{TARGET} is not a DFlash draft" in refusal(CheckpointError, draft=TARGET)


class TestBadCheckpoints:
    def test_a_missing_folder(self, tmp_path):
        assert refusal(CheckpointError, model=tmp_path / "none").startswith(f"{tmp_path / 'none'}: no such folder")
        assert "no such folder" in refusal(CheckpointError, model="none")
        assert "no such folder" in refusal(CheckpointError, draft="./none")

    def test_a_folder_without_config(self, tmp_path):
        assert "config.json is missing" in refusal(CheckpointError, model=tmp_path)

    @pytest.mark.parametrize(
        "text, fault", [("{", "not valid JSON"), ("[1]", "does not hold a JSON object"), ("\xff", "")]
    )
    def test_bad_json(self, tmp_path, text, fault):
        home = copied(TARGET, tmp_path / "t")
        (home / "config.json").write_bytes(text.encode("latin-1"))
        assert fault in refusal(CheckpointError, model=home)

    def test_an_unsupported_family_is_refused_with_the_supported_ones(self, tmp_path):
        home = copied(TARGET, tmp_path / "t", config={"model_type": "gemma4"}, only=["config.json"])
        assert "'gemma4' is not supported; it must be one of qwen3_5, qwen3, llama" in refusal(
            CheckpointError, model=home
        )

    @pytest.mark.parametrize("key", ["model_file", "auto_map"])
    def test_custom_code_is_refused_and_not_run(self, tmp_path, key):
        home = copied(
            TARGET, tmp_path / "t", config={key: "evil.py" if key == "model_file" else {"AutoModel": "evil.X"}}
        )
        (home / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
        assert "its own Python code, which is never run" in refusal(CheckpointError, model=home)
        assert not (tmp_path / "ran").exists()

    def test_a_tokenizer_with_custom_code_is_refused_and_not_run(self, tmp_path):
        home = copied(TARGET, tmp_path / "t")
        settings = json.loads((home / "tokenizer_config.json").read_text())
        settings |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
        (home / "tokenizer_config.json").write_text(json.dumps(settings))
        (home / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
        assert "Python code for the tokenizer, which is never run" in refusal(CheckpointError, model=home)
        assert not (tmp_path / "ran").exists()

    @pytest.mark.parametrize("kept", [0, 5, 100, 2000, -1])
    @pytest.mark.parametrize("role", ["model", "draft"])
    def test_truncated_safetensors_are_named_with_their_sizes(self, tmp_path, role, kept):
        home = copied(TARGET if role == "model" else DRAFT, tmp_path / "c")
        file = home / "model.safetensors"
        file.write_bytes(file.read_bytes()[:kept])
        message = refusal(CheckpointError, **{role: home})
        assert "model.safetensors" in message and message.endswith("download it again")

    @pytest.mark.parametrize("text", [b"{broken", b"[]", b'{"a": {}}', b'{"a": {"data_offsets": [0]}}'])
    def test_a_damaged_safetensors_header_is_named(self, tmp_path, text):
        home = copied(TARGET, tmp_path / "t")
        (home / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
        assert "model.safetensors" in refusal(CheckpointError, model=home)

    def test_a_missing_shard_is_named(self, tmp_path):
        home = copied(TARGET, tmp_path / "t")
        shards = {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}
        (home / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
        message = refusal(CheckpointError, model=home)
        assert "is incomplete" in message and "lacks model-00002-of-00002.safetensors" in message

    def test_missing_weights_or_tokenizer(self, tmp_path):
        no_weights = copied(TARGET, tmp_path / "w", drop=["model.safetensors"])
        assert "holds no model*.safetensors" in refusal(CheckpointError, model=no_weights)
        no_tokenizer = copied(TARGET, tmp_path / "t", drop=["tokenizer.json"])
        assert "has no tokenizer" in refusal(CheckpointError, model=no_tokenizer)

    def test_missing_and_surplus_tensors_are_named(self, tmp_path):
        home = copied(TARGET, tmp_path / "t")
        arrays = tensors(home)
        gone = next(name for name in arrays if name.endswith("q_proj.weight"))
        mx.save_safetensors(str(home / "model.safetensors"), {k: v for k, v in arrays.items() if k != gone})
        assert gone.removeprefix("language_model.model.") in refusal(CheckpointError, model=home)
        mx.save_safetensors(str(home / "model.safetensors"), arrays | {"language_model.model.extra": mx.ones(1)})
        assert "extra" in refusal(CheckpointError, model=home)

    def test_a_revision_goes_with_a_hub_id_only(self):
        assert "a revision (main) goes with a hub id only" in refusal(OptionError, revision="main")


class TestFit:
    def test_too_little_memory_is_refused_with_every_sum_before_loading(self, monkeypatch):
        monkeypatch.setattr(fit, "memory", lambda: fit.Memory(8 * 10**9, 10**6, "a test's rule"))
        message = refusal(ResourceError, draft=DRAFT)
        for part in ("target 2.1 MB", "draft 1.2 MB", "state 0.1 MB", "keys and values", "at 4096 tokens"):
            assert part in message
        assert "gives 1.0 MB of 8.0 GB (threshold: a test's rule)" in message

    def test_lazy_loading_asks_for_no_memory(self, monkeypatch):
        monkeypatch.setattr(fit, "memory", lambda: fit.Memory(0, 0, "nothing"))
        assert load(model=str(TARGET), draft=str(DRAFT), lazy=True).draft is not None

    def test_this_machine_has_memory(self):
        have = fit.memory()
        assert 10**8 < have.usable <= have.total and have.rule

    def test_a_dense_target_has_keys_and_values_in_every_layer_and_no_state(self):
        config = {"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
        need = fit.need(100, 0, Reader("a target", config), None)
        assert need.state == 0 and need.kv == 36 * 2 * 8 * 128 * 2 * fit.CONTEXT
        values = json.loads((DRAFT / "config.json").read_text())
        values |= {"layer_types": ["full_attention"] * 5, "num_key_value_heads": 4, "head_dim": 64}
        full = fit.need(100, 0, Reader("a target", config), DraftConfig.from_json(values, "a draft"))
        assert full.kv - need.kv == 5 * 2 * 4 * 64 * 2 * fit.CONTEXT

    def test_a_config_with_gaps_is_named(self, tmp_path):
        home = copied(DATA / "t-hybrid-fp32", tmp_path / "t")
        values = json.loads((home / "config.json").read_text())
        del values["text_config"]["num_attention_heads"]
        (home / "config.json").write_text(json.dumps(values))
        assert "config.json has no 'num_attention_heads'" in refusal(CheckpointError, model=home)
