"""Write the trained pair in the layouts that the engine loads: `export.py TRAINED_FOLDER TOKENIZER OUT_FOLDER`."""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from shapes import END_OF_TEXT, IM_END, SPECIALS, DraftShape, TargetShape
from torch import Tensor

TEMPLATE = """\
{#- The model does not reason: a request for a reasoning phase adds nothing to the prompt. -#}
{%- set reasons = enable_thinking is defined and enable_thinking and false -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
LENGTH = 2048


def target_config(s: TargetShape) -> dict[str, Any]:
    """config.json of the target, with the field names of the flagship's."""
    kinds = ["full_attention" if (i + 1) % s.interval == 0 else "linear_attention" for i in range(s.layers)]
    pairs = int(s.head_dim * s.rotary) // 2
    text = {
        "model_type": "qwen3_5_text",
        "attention_bias": False,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": END_OF_TEXT,
        "full_attention_interval": s.interval,
        "head_dim": s.head_dim,
        "hidden_act": "silu",
        "hidden_size": s.hidden,
        "intermediate_size": s.intermediate,
        "layer_types": kinds,
        "linear_conv_kernel_dim": s.conv_kernel,
        "linear_key_head_dim": s.key_dim,
        "linear_num_key_heads": s.key_heads,
        "linear_num_value_heads": s.value_heads,
        "linear_value_head_dim": s.value_dim,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": LENGTH,
        "num_attention_heads": s.heads,
        "num_hidden_layers": s.layers,
        "num_key_value_heads": s.kv_heads,
        "rms_norm_eps": s.eps,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": s.theta,
            "partial_rotary_factor": s.rotary,
            "mrope_interleaved": True,
            "mrope_section": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3],
        },
        "tie_word_embeddings": False,
        "vocab_size": s.vocab,
    }
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "dtype": "bfloat16",
        "eos_token_id": [IM_END, END_OF_TEXT],
        "tie_word_embeddings": False,
        "text_config": text,
    }


def draft_config(s: DraftShape) -> dict[str, Any]:
    """config.json of the draft, with the fields of the published DFlash 2 checkpoints."""
    return {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": END_OF_TEXT,
        "pad_token_id": END_OF_TEXT,
        "dflash_config": {
            "block_size": s.block,
            "conv_group_size": s.conv_group,
            "conv_kernel_size": s.conv_kernel,
            "mask_token_id": s.mask_id,
            "selector_rank": s.rank,
            "selector_top_k": s.top_k,
            "target_layer_ids": list(s.taps),
        },
        "dtype": "bfloat16",
        "head_dim": s.head_dim,
        "hidden_act": "silu",
        "hidden_size": s.hidden,
        "initializer_range": 0.02,
        "intermediate_size": s.intermediate,
        "is_causal": False,
        "layer_types": ["sliding_attention"] * s.layers,
        "max_position_embeddings": LENGTH,
        "max_window_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_hidden_layers": s.layers,
        "num_key_value_heads": s.kv_heads,
        "num_target_layers": s.target_layers,
        "rms_norm_eps": s.eps,
        "rope_parameters": {"rope_theta": s.theta, "rope_type": "default"},
        "sliding_window": s.window,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": True,
        "vocab_size": s.vocab,
    }


def target_weights(state: dict[str, Tensor], dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """The target's tensors under mlx-lm's names; A_log stays float32."""
    out = {}
    for name, tensor in state.items():
        kept = tensor.float() if name.endswith("A_log") else tensor.to(dtype)
        if name.endswith("conv1d"):
            name, kept = name + ".weight", kept[..., None]
        prefix = "language_model." if name.startswith("lm_head") else "language_model.model."
        out[prefix + name] = kept.contiguous()
    return out


def dump(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def save_target(state: dict[str, Tensor], folder: Path, s: TargetShape, dtype: torch.dtype = torch.bfloat16) -> None:
    """config.json and model.safetensors of the target."""
    folder.mkdir(parents=True, exist_ok=True)
    dump(folder / "config.json", target_config(s))
    save_file(target_weights(state, dtype), folder / "model.safetensors", metadata={"format": "mlx"})


def save_draft(state: dict[str, Tensor], folder: Path, shape: DraftShape, dtype: torch.dtype = torch.bfloat16) -> None:
    """config.json and model.safetensors of the draft, whose module names are already the published ones."""
    folder.mkdir(parents=True, exist_ok=True)
    dump(folder / "config.json", draft_config(shape))
    weights = {k: v.to(dtype).contiguous() for k, v in state.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def save_tokenizer(tokenizer: Path, folder: Path, temperature: float, top_p: float, top_k: int) -> None:
    """Tokenizer, chat template and sampling defaults."""
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": list(SPECIALS),
        "clean_up_tokenization_spaces": False,
        "model_max_length": LENGTH,
    }
    dump(folder / "tokenizer_config.json", settings)
    defaults = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    stops = {"eos_token_id": [IM_END, END_OF_TEXT], "pad_token_id": END_OF_TEXT}
    dump(folder / "generation_config.json", stops | defaults)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trained", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--top-k", type=int, default=40)
    args = parser.parse_args()
    save_target(load_file(args.trained / "target.safetensors"), args.out / "target", TargetShape())
    save_tokenizer(args.tokenizer, args.out / "target", args.temperature, args.top_p, args.top_k)
    save_draft(load_file(args.trained / "draft.safetensors"), args.out / "draft", DraftShape())


if __name__ == "__main__":
    main()
