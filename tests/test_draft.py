"""The drafter net's variants, its context in time order, and how its weights are read."""

import json

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from pairs import CHECKPOINTS, config_of, draft_of, ids_of, prompt_of, run, target_of

from dflash_mlx.drafter import Drafter
from dflash_mlx.errors import CheckpointError, OptionError
from dflash_mlx.models import DraftConfig, load_draft
from dflash_mlx.models.context import STEP, Context, ContextLayer
from dflash_mlx.models.draft import convolve, softcapped, top_ids
from dflash_mlx.sampling import Sampler
from dflash_mlx.types import Options, Sampling


def changed(name: str, nested: dict | None = None, **top) -> dict:
    config = config_of(name)
    config["dflash_config"] |= nested or {}
    config |= top
    return {key: value for key, value in config.items() if value is not ...}


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 9), st.lists(st.integers(1, 7), min_size=1, max_size=12), st.integers(1, 6))
def test_context_is_the_last_rows_in_time_order(window, appended, block):
    layer, position = ContextLayer(window), 0
    for rows in appended:
        fresh = mx.arange(position, position + rows, dtype=mx.float32).reshape(1, 1, rows, 1)
        layer.append(fresh, -fresh)
        position += rows
        marker = mx.full((1, 1, block, 1), 1e6)
        keys, values = layer.extend(marker, -marker, 0)
        held = range(0 if not window else max(0, position - (window - 1)), position)
        assert keys.flatten().tolist() == [*map(float, held), *[1e6] * block]
        assert mx.array_equal(values, -keys)
        assert (layer.length, layer.held) == (position, len(held))


def test_context_buffers_stay_small():
    layer = ContextLayer(16)
    for _ in range(4 * STEP):
        layer.append(mx.zeros((1, 1, 1, 4)), mx.zeros((1, 1, 1, 4)))
        layer.extend(mx.zeros((1, 1, 8, 4)), mx.zeros((1, 1, 8, 4)), 0)
    assert layer.keys.shape[2] <= 3 * STEP


def test_only_feature_rows_that_a_query_can_see_are_projected():
    target, net = target_of("t-hybrid-fp32"), draft_of("h-d2-slide")
    drafter, context = Drafter(net, target), net.new_context()
    width = net.config.hidden_size * len(net.config.taps)
    drafter.absorb(mx.zeros((1, 100, width)), context, last=130)
    assert context.length == 100 and context.layers[0].held == 0
    drafter.absorb(mx.zeros((1, 30, width)), context, last=130)
    assert context.length == 130 and context.fresh.shape[1] == 15
    drafter.absorb(mx.zeros((1, 8, width)), context, last=138)
    assert context.length == 138 and context.fresh is None and context.layers[0].held == 15


@pytest.mark.parametrize("window", [1, 2, 5])
@pytest.mark.parametrize("chunk", [3, 2048])
def test_tiny_windows_draft_as_a_fresh_context_would(window, chunk):
    """Windows down to one (no context at all), prompts longer than the window, blocks longer than the window."""
    target = target_of("t-hybrid-fp32")
    net = load_draft(
        CHECKPOINTS / "h-d2-slide", DraftConfig.from_json(changed("h-d2-slide", sliding_window=window), "narrow")
    )
    prompt = prompt_of("t-hybrid-fp32", "p40")
    cycles = run(target, net, prompt, Options(40, prefill_chunk=chunk), (), 8)
    assert ids_of(cycles) == ids_of(run(target, None, prompt, Options(40)))
    emitted = list(cycles[0].tokens)
    for cycle in cycles[1:]:
        ids = [*prompt, *emitted]
        features = target.forward(mx.array([ids[:-1]]), target.new_state(), net.config.taps).features
        context = net.new_context()
        net.absorb(features, context)
        drafter = Drafter(net, target)
        fresh = drafter.propose(ids[-1], len(cycle.drafted), context, Sampler(Sampling()))
        assert tuple(fresh.tokens.tolist()) == cycle.drafted
        emitted += cycle.tokens


@pytest.mark.parametrize(
    "windows, causal, seen",
    [
        ((0,), False, None),
        ((4,), False, [[1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]]),
        ((4,), True, [[1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1]]),
        ((0,), True, [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]]),
        ((6,), False, None),
    ],
)
def test_masks_hide_old_context_and_later_rows(windows, causal, seen):
    context = Context(windows)
    for layer in context.layers:
        layer.append(mx.zeros((1, 1, 3, 1)), mx.zeros((1, 1, 3, 1)))
    (mask,) = context.masks(3, (causal,))
    assert (mask if mask is None else mask.astype(mx.int32).tolist()) == seen


def test_convolution_moves_zeros_in_before_the_first_row():
    x = mx.array([[[1.0], [2.0], [3.0]]])
    kernel = mx.array([[[1.0]] * 3, [[10.0]] * 3, [[100.0]] * 3, [[1000.0]] * 3])
    assert convolve(x, kernel).flatten().tolist() == [1.0, 12.0, 123.0]
    assert convolve(x[:, :1], kernel[:, :1]).flatten().tolist() == [1.0]


@pytest.mark.parametrize("width", [100, 8192, 10_001])
def test_top_ids_are_the_largest(width):
    logits = mx.random.normal((3, width), key=mx.random.key(width))
    wanted = mx.sort(mx.argsort(-logits, axis=-1)[:, :16], axis=-1)
    assert mx.array_equal(mx.sort(top_ids(logits, 16), axis=-1), wanted)


def test_codebooks_load_with_and_without_the_weight_suffix(tmp_path):
    folder, config = CHECKPOINTS / "h-d2-slide", DraftConfig.from_json(config_of("h-d2-slide"), "draft")
    weights = mx.load(str(folder / "model.safetensors"))
    renamed = {f"{key}.weight" if key.endswith("codebook") else key: value for key, value in weights.items()}
    assert renamed.keys() != weights.keys()
    mx.save_safetensors(str(tmp_path / "model.safetensors"), renamed)
    for one, other in zip(*(tree_flatten(load_draft(f, config).parameters()) for f in (folder, tmp_path)), strict=True):
        assert one[0] == other[0] and mx.array_equal(one[1], other[1])


@pytest.mark.parametrize("change", ["lacks", "has unknown", "shape"])
def test_wrong_tensors_are_named(tmp_path, change):
    weights = mx.load(str(CHECKPOINTS / "h-d2-slide" / "model.safetensors"))
    if change == "lacks":
        del weights["candidate_selector.predecessor_codebook"]
    elif change == "has unknown":
        weights["layers.9.extra"] = mx.zeros((1,))
    else:
        weights["fc.weight"] = mx.zeros((3, 3))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    with pytest.raises(CheckpointError, match=change):
        load_draft(tmp_path, DraftConfig.from_json(config_of("h-d2-slide"), "draft"))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", ["h-d1-full", "h-d2-slide"])
def test_draft_bits_quantize_at_load_and_quantized_folders_load_as_they_are(tmp_path, name, bits):
    config = DraftConfig.from_json(config_of(name), name)
    net = load_draft(CHECKPOINTS / name, config, bits)
    kinds = {type(module).__name__ for module in net.modules()}
    assert "QuantizedLinear" in kinds and "Linear" not in kinds
    # 16 columns are no multiple of a quantization group: these codebooks stay as they are.
    assert ("Embedding" in kinds) == (config.version == 2) and "QuantizedEmbedding" not in kinds
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(tree_flatten(net.parameters())))
    again = load_draft(tmp_path, config)
    for one, other in zip(tree_flatten(net.parameters()), tree_flatten(again.parameters()), strict=True):
        assert one[0] == other[0] and mx.array_equal(one[1], other[1])
    target, prompt = target_of("t-hybrid-fp32"), prompt_of("t-hybrid-fp32", "p17")
    cycles = run(target, again, prompt, Options(40), (), 8)
    assert ids_of(cycles) == ids_of(run(target, None, prompt, Options(40)))
    assert sum(cycle.accepted for cycle in cycles) > 10, "a quantized draft still drafts"


def test_other_draft_bits_are_refused():
    with pytest.raises(OptionError, match="draft_bits must be 4 or 8, not 3"):
        load_draft(CHECKPOINTS / "h-d2-slide", DraftConfig.from_json(config_of("h-d2-slide"), "draft"), 3)


def test_float16_drafts_run_as_bfloat16(tmp_path):
    weights = mx.load(str(CHECKPOINTS / "h-d2-slide" / "model.safetensors"))
    half = {key: value.astype(mx.float16) for key, value in weights.items()}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), half)
    net = load_draft(tmp_path, DraftConfig.from_json(config_of("h-d2-slide"), "half"))
    assert {value.dtype for _, value in tree_flatten(net.parameters())} == {mx.bfloat16}


def test_drafts_do_not_own_the_targets_embedding_and_head():
    target, net = target_of("t-hybrid-fp32"), draft_of("h-d2-slide")
    before = {name for name, _ in tree_flatten(net.parameters())}
    run(target, net, [1, 2, 3], Options(5), (), 8)
    assert {name for name, _ in tree_flatten(net.parameters())} == before
    assert not any("embed" in name or "lm_head" in name for name in before)


def test_settings_are_read_at_either_level_and_the_nested_one_wins():
    read = lambda config: DraftConfig.from_json(config, "draft")  # noqa: E731
    scales = {"input_embedding_scale": 2.0, "output_multiplier": 3.0, "final_logit_softcapping": 15}
    at_top = read(changed("h-d2-slide", **scales))
    assert (at_top.embedding_scale, at_top.output_multiplier, at_top.softcap) == (2.0, 3.0, 15.0)
    assert read(changed("h-d2-slide", {"output_multiplier": 0.5}, **scales)).output_multiplier == 0.5
    assert read(changed("h-d2-slide", {"block_size": 8}, block_size=16)).block_size == 8
    assert read(changed("h-d2-slide", {"block_size": None}, block_size=16)).block_size == 16
    with pytest.raises(CheckpointError, match="block_size"):
        read(changed("h-d2-slide", {"block_size": None}, block_size=...))
    rope = read(changed("h-d2-slide", rope_theta=..., rope_parameters={"rope_theta": 1e7, "rope_type": "default"}))
    assert rope.rope_theta == 1e7 and rope.rope_scaling is None


def test_softcap_and_multiplier_change_the_logits():
    config = DraftConfig.from_json(
        changed("h-d2-slide", {"output_multiplier": 2.0, "final_logit_softcapping": 4.0}), "draft"
    )
    assert softcapped(mx.array([0.0, 1.0, 100.0]), config).tolist() == pytest.approx([0.0, 4 * 0.46211716, 4.0])


@pytest.mark.parametrize(
    "stated, types, wanted",
    [
        (..., ["sliding_attention", "full_attention"], (True, False)),
        (True, ["sliding_attention", "full_attention"], (True, True)),
        (False, ["sliding_attention", "full_attention"], (False, False)),
    ],
)
def test_causality_inside_the_block(stated, types, wanted):
    config = changed("h-d2-slide", is_causal=stated, layer_types=types, num_hidden_layers=2)
    assert DraftConfig.from_json(config, "draft").causal == wanted
    if stated is not ...:
        nested = changed("h-d2-slide", {"causal": stated}, is_causal=..., layer_types=types, num_hidden_layers=2)
        assert DraftConfig.from_json(nested, "draft").causal == wanted


def test_selector_vocabulary_smaller_than_the_models(tmp_path):
    """Codebooks end early: candidates stay inside them, an anchor beyond has no preferences, output is the target's."""
    config = DraftConfig.from_json(changed("h-d2-slide", selector_vocab_size=400), "short")
    weights = mx.load(str(CHECKPOINTS / "h-d2-slide" / "model.safetensors"))
    weights = {key: value[:400] if key.endswith("codebook") else value for key, value in weights.items()}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    net, target, prompt = load_draft(tmp_path, config), target_of("t-hybrid-fp32"), prompt_of("t-hybrid-fp32", "p17")
    cycles = run(target, net, prompt, Options(60), (), 8)
    assert ids_of(cycles) == ids_of(run(target, None, prompt, Options(60)))
    assert max(token for cycle in cycles for token in cycle.drafted) < 400
    assert any(cycle.tokens[-1] >= 400 for cycle in cycles), "an anchor beyond the codebooks occurred"


BAD = {
    "target_layer_ids": {"dflash_config": {"target_layer_ids": [1, 99]}},
    "mask_token_id": {"dflash_config": {"mask_token_id": 5000}},
    "conv_group_size": {"dflash_config": {"conv_group_size": 7}},
    "layer_types": {"layer_types": ["full_attention"]},
    "num_attention_heads": {"num_attention_heads": 0},
    "rms_norm_eps": {"rms_norm_eps": "small"},
}


@pytest.mark.parametrize("key", BAD)
def test_contradicting_configs_are_refused_by_key(key):
    top = dict(BAD[key])
    config = changed("h-d2-slide", top.pop("dflash_config", None), **top)
    with pytest.raises(CheckpointError, match=key):
        DraftConfig.from_json(json.loads(json.dumps(config)), "draft")


def test_a_folder_of_another_kind_is_not_a_draft():
    with pytest.raises(CheckpointError, match="not a DFlash draft"):
        DraftConfig.from_json(config_of("t-dense-fp32"), "target")
