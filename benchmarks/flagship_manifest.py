"""Every tensor of the flagship pair by name, dtype and shape, and files that hold them without their data."""

import json
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

LAYERS, HIDDEN, INTER, VOCAB = 64, 5120, 17408, 248320
TARGET_PAYLOAD, DRAFT_PAYLOAD = 16_054_262_240, 3_848_808_960  # published bytes, headers apart
WIDTH = {"U32": 4, "BF16": 2}


class Spec(NamedTuple):
    """A tensor's safetensors dtype and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes of data."""
        return prod(self.shape) * WIDTH[self.dtype]


Tensors = dict[str, Spec]


def _dense(*shape: int) -> Spec:
    return Spec("BF16", shape)


def _quantized(name: str, rows: int, columns: int) -> Tensors:
    """4-bit affine in groups of 64: eight weights to a word, a scale and a bias to a group."""
    groups = _dense(rows, columns // 64)
    return {f"{name}.weight": Spec("U32", (rows, columns // 8)), f"{name}.scales": groups, f"{name}.biases": groups}


def _attention(name: str) -> Tensors:
    made: Tensors = {}
    for part, rows, columns in (("q", 12288, HIDDEN), ("k", 1024, HIDDEN), ("v", 1024, HIDDEN), ("o", HIDDEN, 6144)):
        made |= _quantized(f"{name}.{part}_proj", rows, columns)
    return made | {f"{name}.q_norm.weight": _dense(256), f"{name}.k_norm.weight": _dense(256)}


def _delta_net(name: str) -> Tensors:
    made: Tensors = {}
    for part, rows in (("qkv", 10240), ("z", 6144), ("a", 48), ("b", 48)):
        made |= _quantized(f"{name}.in_proj_{part}", rows, HIDDEN)
    made |= _quantized(f"{name}.out_proj", HIDDEN, 6144)
    made |= {f"{name}.A_log": _dense(48), f"{name}.dt_bias": _dense(48), f"{name}.norm.weight": _dense(128)}
    return made | {f"{name}.conv1d.weight": _dense(10240, 4, 1)}


def _layer(index: int) -> Tensors:
    name = f"language_model.model.layers.{index}"
    made = _attention(f"{name}.self_attn") if index % 4 == 3 else _delta_net(f"{name}.linear_attn")
    made |= _quantized(f"{name}.mlp.gate_proj", INTER, HIDDEN) | _quantized(f"{name}.mlp.up_proj", INTER, HIDDEN)
    made |= _quantized(f"{name}.mlp.down_proj", HIDDEN, INTER)
    norms = ("input_layernorm", "post_attention_layernorm")
    return made | {f"{name}.{norm}.weight": _dense(HIDDEN) for norm in norms}


def _vision() -> Tensors:
    width, inter, merged = 1152, 4304, 4608
    made = {"patch_embed.proj.weight": _dense(width, 2, 16, 16, 3), "patch_embed.proj.bias": _dense(width)}
    made |= {"pos_embed.weight": _dense(2304, width)}
    shapes = {"norm1": (width,), "norm2": (width,), "attn.qkv": (3 * width, width), "attn.proj": (width, width)}
    shapes |= {"mlp.linear_fc1": (inter, width), "mlp.linear_fc2": (width, inter)}
    blocks = {f"blocks.{index}.{part}": shape for index in range(27) for part, shape in shapes.items()}
    blocks |= {"merger.norm": (width,), "merger.linear_fc1": (merged, merged), "merger.linear_fc2": (HIDDEN, merged)}
    for part, shape in blocks.items():
        made |= {f"{part}.weight": _dense(*shape), f"{part}.bias": _dense(shape[0])}
    return {f"vision_tower.{name}": spec for name, spec in made.items()}


def target_tensors(layers: int = LAYERS) -> Tensors:
    """Return the 2,180 tensors of mlx-community/Qwen3.8-27B-4bit, or of its like with fewer layers."""
    made = _vision() | _quantized("language_model.model.embed_tokens", VOCAB, HIDDEN)
    for index in range(layers):
        made |= _layer(index)
    made |= {"language_model.model.norm.weight": _dense(HIDDEN)}
    return made | _quantized("language_model.lm_head", VOCAB, HIDDEN)


def draft_tensors() -> Tensors:
    """Return the 81 tensors of z-lab/Qwen3.8-27B-DFlash2."""
    made = {
        "fc.weight": _dense(HIDDEN, 5 * HIDDEN),
        "hidden_norm.weight": _dense(HIDDEN),
        "norm.weight": _dense(HIDDEN),
    }
    made |= {f"candidate_selector.{side}_codebook": _dense(VOCAB, 256) for side in ("predecessor", "successor")}
    made |= {"candidate_selector.hidden_projection.weight": _dense(256, HIDDEN)}
    shapes = {"q_proj": (4096, HIDDEN), "k_proj": (1024, HIDDEN), "v_proj": (1024, HIDDEN), "o_proj": (HIDDEN, 4096)}
    shapes |= {"q_norm": (128,), "k_norm": (128,)}
    parts = {f"self_attn.{part}.weight": shape for part, shape in shapes.items()}
    for part in ("attention_conv", "mlp_conv"):
        parts |= {f"{part}.base_kernel": (2, 2, HIDDEN), f"{part}.kernel_projection.weight": (1280, HIDDEN)}
    parts |= {"mlp.gate_proj.weight": (INTER, HIDDEN), "mlp.up_proj.weight": (INTER, HIDDEN)}
    parts |= {"mlp.down_proj.weight": (HIDDEN, INTER)}
    parts |= {"input_layernorm.weight": (HIDDEN,), "post_attention_layernorm.weight": (HIDDEN,)}
    return made | {f"layers.{i}.{part}": _dense(*shape) for i in range(5) for part, shape in parts.items()}


def target_config(layers: int = LAYERS) -> dict[str, Any]:
    """Return the target's config.json as far as it is published: the text part in full."""
    rope = {"rope_theta": 10000000, "rope_type": "default", "partial_rotary_factor": 0.25}
    rope |= {"mrope_interleaved": True, "mrope_section": [11, 11, 10]}
    text = {
        "model_type": "qwen3_5_text", "hidden_size": HIDDEN, "num_hidden_layers": layers, "intermediate_size": INTER,
        "full_attention_interval": 4, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256,
        "attn_output_gate": True, "output_gate_type": "swish", "attention_bias": False, "linear_num_key_heads": 16,
        "linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4, "mamba_ssm_dtype": "float32", "rope_parameters": rope, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262144, "vocab_size": VOCAB, "tie_word_embeddings": False, "dtype": "bfloat16",
        "bos_token_id": 248044, "eos_token_id": 248044, "pad_token_id": None, "mtp_num_hidden_layers": 1,
        "layer_types": ["full_attention" if index % 4 == 3 else "linear_attention" for index in range(layers)],
    }  # fmt: skip
    vision = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16}
    quantization = {"group_size": 64, "bits": 4, "mode": "affine"}
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text,
        "vision_config": vision, "quantization": quantization, "quantization_config": quantization,
        "image_token_id": 248056, "video_token_id": 248057, "tie_word_embeddings": False,
    }  # fmt: skip


def generation_config() -> dict[str, Any]:
    """Return the target's generation_config.json."""
    sampling = {"do_sample": True, "temperature": 1.0, "top_p": 0.95, "top_k": 20}
    return sampling | {"eos_token_id": [248046, 248044], "pad_token_id": 248044}


def draft_config(layers: int = LAYERS) -> dict[str, Any]:
    """Return the draft's config.json, its taps moved together for a target with fewer layers."""
    nested = {
        "block_size": 8, "mask_token_id": 248070, "selector_rank": 256, "selector_top_k": 16, "conv_kernel_size": 2,
        "conv_group_size": 16, "target_layer_ids": [tap * layers // LAYERS for tap in (5, 19, 33, 47, 61)],
    }  # fmt: skip
    return {
        "architectures": ["DFlash2DraftModel"], "model_type": "qwen3", "hidden_size": HIDDEN, "num_hidden_layers": 5,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": INTER,
        "vocab_size": VOCAB, "num_target_layers": layers, "layer_types": ["sliding_attention"] * 5,
        "sliding_window": 2048, "use_sliding_window": True, "max_window_layers": 5, "is_causal": False,
        "max_position_embeddings": 262144, "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"},
        "rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False,
        "bos_token_id": None, "eos_token_id": 248044, "pad_token_id": 248044, "dtype": "bfloat16",
        "dflash_config": nested,
    }  # fmt: skip


def shards(tensors: Tensors, limit: int = 5 << 30) -> list[Tensors]:
    """Split tensors in order into files of at most `limit` bytes: three for the target, as published."""
    made: list[Tensors] = [{}]
    room = limit
    for name, spec in tensors.items():
        if spec.size > room:
            made.append({})
            room = limit
        made[-1][name] = spec
        room -= spec.size
    return made


def header(tensors: Tensors) -> bytes:
    """Return the safetensors header of one file, its length in front."""
    entries: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    at = 0
    for name, spec in tensors.items():
        entries[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [at, at + spec.size]}
        at += spec.size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_folder(folder: Path, config: dict[str, Any], tensors: Tensors, fill: Any = None) -> list[Path]:
    """Write config.json and the weight files, with an index where there are several; return the weight files.

    `fill(file, name, spec)` writes a tensor's data; without it the files are sparse and take no room.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    parts, index, files = shards(tensors), {}, []
    for number, part in enumerate(parts, 1):
        shard = "model.safetensors" if len(parts) == 1 else f"model-{number:05}-of-{len(parts):05}.safetensors"
        index |= dict.fromkeys(part, shard)
        files.append(folder / shard)
        with files[-1].open("wb") as file:
            file.write(header(part))
            for name, spec in part.items() if fill else ():
                fill(file, name, spec)
            file.truncate(len(header(part)) + sum(spec.size for spec in part.values()))
    if len(parts) > 1:
        total = sum(spec.size for spec in tensors.values())
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index})
        (folder / "model.safetensors.index.json").write_text(text)
    return files
