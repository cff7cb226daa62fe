"""Our explicit forwards against mlx-lm's own, array by array, in every family."""

import json
import shutil

import mlx.core as mx
import pytest
from mlx_lm.models import llama, qwen3, qwen3_5
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
from pairs import CHECKPOINTS, config_of, model_of

from dflash_mlx.errors import CheckpointError
from dflash_mlx.models import TargetConfig, build_target
from dflash_mlx.rollback import DeltaLayer

DENSE = {
    "hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "vocab_size": 97, "max_position_embeddings": 512,
    "rope_theta": 1e4, "tie_word_embeddings": True,
}  # fmt: skip
HYBRID = DENSE | {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 2, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}, "tie_word_embeddings": False,
}  # fmt: skip


def random_model(family: str):
    mx.random.seed(4)
    if family == "qwen3_5":
        config = {"model_type": family, "text_config": HYBRID | {"model_type": "qwen3_5_text"}}
        model = qwen3_5.Model(qwen3_5.ModelArgs.from_dict(config))
    else:
        config = DENSE | {"model_type": family}
        module = {"llama": llama, "qwen3": qwen3}[family]
        model = module.Model(module.ModelArgs.from_dict(config))
    mx.eval(model.parameters())
    return model, TargetConfig.from_json(config, family)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3", "llama"])
def test_forward_is_mlx_lms_bit_for_bit(family, dtype):
    """Prefill in two chunks and then single rows: same logits, same keys, values, convolution and recurrent states."""
    model, config = random_model(family)
    model.set_dtype(dtype)
    target, state, cache = build_target(model, config), None, make_prompt_cache(model)
    state = target.new_state()
    ids = mx.random.randint(0, 97, (1, 30), key=mx.random.key(2))
    for low, high, tape in ((0, 11, False), (11, 25, False), (25, 26, False), (26, 27, True), (27, 28, True)):
        made = target.unembed(target.forward(ids[:, low:high], state, tape=tape).hidden)
        assert mx.array_equal(made, model(ids[:, low:high], cache=cache)), (low, high)
    for layer, theirs in zip(state.layers, cache, strict=True):
        if isinstance(layer, DeltaLayer):
            ours = [layer.conv_state(layer.inputs), layer.settled(layer.recurrent)]
            assert ours[1].dtype == mx.float32
        else:
            ours = [part[:, :, : layer.length] for part in layer.arrays()]
            theirs = [part[:, :, : layer.length] for part in (theirs.keys, theirs.values)]
        for index, array in enumerate(ours):
            assert mx.array_equal(array, theirs[index])


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3", "llama"])
def test_taps_are_layer_outputs_before_the_final_norm(family):
    model, config = random_model(family)
    target, ids = build_target(model, config), mx.array([[5, 9, 2, 60]])
    made = target.forward(ids, target.new_state(), (0, 3, 1))
    body = target.body
    h, outputs = body.embed_tokens(ids), []
    cache = make_prompt_cache(model)
    for layer, memory in zip(body.layers, cache, strict=True):
        h = layer(h, None if family == "qwen3_5" and layer.is_linear else "causal", memory)
        outputs.append(h)
    assert mx.array_equal(made.features, mx.concatenate([outputs[0], outputs[3], outputs[1]], axis=-1))
    assert mx.array_equal(made.hidden, body.norm(outputs[3]))
    assert target.best(made.hidden).tolist() == mx.argmax(model(ids), axis=-1).tolist()


@pytest.mark.parametrize("name", ["t-hybrid-4bit", "t-dense-4bit"])
def test_quantized_checkpoints_run_as_in_mlx_lm(name):
    model = model_of(name)
    config = TargetConfig.from_json(config_of(name), name)
    target, ids = build_target(model, config), mx.array([[5, 9, 2, 60, 7]])
    assert config.bits == 4 and config.eos_ids == (510, 508)
    assert mx.array_equal(target.unembed(target.forward(ids, target.new_state(), tape=False).hidden), model(ids))


def test_checkpoint_in_the_trainers_layout_loads_to_the_same_outputs(tmp_path):
    """Other key prefix, convolutions channel-first, norms stored less one, tensors of a vision tower and of MTP."""
    weights = mx.load(str(CHECKPOINTS / "t-hybrid-fp32" / "model.safetensors"))
    norms = ("layernorm.weight", "q_norm.weight", "k_norm.weight", "model.norm.weight")
    raw = {}
    for key, array in weights.items():
        key = key.replace("language_model.model.", "model.language_model.").replace("language_model.lm_head", "lm_head")
        array = array.moveaxis(1, 2) if "conv1d" in key else array
        raw[key] = array - 1.0 if key.endswith(norms) or key == "model.language_model.norm.weight" else array
    extra = {"model.visual.blocks.0.weight": mx.zeros((2, 2)), "mtp.layers.0.weight": mx.zeros((2, 2))}
    shutil.copy(CHECKPOINTS / "t-hybrid-fp32" / "config.json", tmp_path)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), raw | extra)
    model, _ = load_model(tmp_path)
    config = TargetConfig.from_json(config_of("t-hybrid-fp32"), "raw")
    ids = mx.array([[5, 9, 2, 60, 7]])
    ours, theirs = (build_target(m, config) for m in (model, model_of("t-hybrid-fp32")))
    made, wanted = (t.unembed(t.forward(ids, t.new_state()).hidden) for t in (ours, theirs))
    assert mx.abs(made - wanted).max().item() < 1e-4


def test_states_say_when_rows_cannot_be_forgotten_any_more():
    model, config = random_model("qwen3_5")
    target = build_target(model, config)
    state = target.new_state()
    target.forward(mx.array([[1, 2, 3]]), state, tape=False)
    target.forward(mx.array([[4, 5]]), state)
    with pytest.raises(ValueError, match=r"keep\(2\)"):
        state.keep(2)
    with pytest.raises(ValueError, match=r"keep\(6\)"):
        state.keep(6)
    state.keep(4)
    assert state.length == 4 and state.nbytes > 0


REFUSED = {
    "model_type 'gemma4'": {"model_type": "gemma4"},
    "is a draft": {"architectures": ["DFlash2DraftModel"], "model_type": "qwen3"},
    "mixture-of-experts": {"model_type": "qwen3_5", "text_config": HYBRID | {"num_experts": 8}},
    "own Python": {"model_type": "qwen3", "auto_map": {"AutoModel": "x.py"}},
    "no 'hidden_size'": {"model_type": "qwen3", "num_hidden_layers": 2},
    "num_hidden_layers = 'two'": DENSE | {"model_type": "qwen3", "num_hidden_layers": "two"},
    "sliding": DENSE | {"model_type": "llama", "layer_types": ["sliding_attention"] * 4, "sliding_window": 8},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_other_targets_are_refused_by_name_and_reason(reason):
    with pytest.raises(CheckpointError, match=reason) as caught:
        TargetConfig.from_json(json.loads(json.dumps(REFUSED[reason])), "some/model")
    assert "some/model" in str(caught.value) and "\n" not in str(caught.value)
