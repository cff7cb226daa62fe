"""dflash 0.1.0 as a measuring partner: its own loop over a model and a draft that are already in memory."""

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

SAME = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
        "intermediate_size", "rms_norm_eps", "max_position_embeddings", "num_target_layers", "sliding_window",
        "is_causal")  # fmt: skip
NESTED = {"mask_token_id": None, "conv_kernel_size": 0, "conv_group_size": 0, "selector_rank": 0, "selector_top_k": 0,
          "input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": None}  # fmt: skip


class Peer:
    """The package dflash, found in `folder` (made with pip install --no-deps --target, never a dependency of ours)."""

    def __init__(self, folder: str) -> None:
        sys.path.append(folder)
        from dflash import model_mlx

        self.code = model_mlx

    def draft(self, config: dict[str, Any], weights: dict[str, mx.array] | None = None) -> nn.Module:
        """Return its drafter for a config.json, with `weights` as a checkpoint names them, or untouched."""
        inner, rope = config["dflash_config"], config.get("rope_parameters") or {}
        made = self.code.DFlashConfig(
            **{name: config.get(name) for name in SAME},
            **{name: inner.get(name, default) for name, default in NESTED.items()},
            block_size=inner["block_size"],
            target_layer_ids=tuple(inner["target_layer_ids"]),
            layer_types=tuple(config["layer_types"]),
            rope_theta=rope.get("rope_theta", config.get("rope_theta")),
            rope_scaling=rope or None,
        )
        second = "DFlash2DraftModel" in config["architectures"]
        net = (self.code.DFlash2DraftModel if second else self.code.DFlashDraftModel)(made)
        if weights is not None:
            named = {f"{name}.weight" if name.endswith("codebook") else name: a for name, a in weights.items()}
            net.load_weights(list(named.items()))
        return net

    def stream(self, model: nn.Module, draft: nn.Module, prompt: list[int], block: int, tokens: int) -> Iterator[Any]:
        """Yield its responses, greedy, without any text or stop."""
        silent = SimpleNamespace(add_token=int, finalize=int, reset=int, last_segment="")
        tokenizer = self.code.TokenizerWrapper.__new__(self.code.TokenizerWrapper)
        tokenizer.__dict__ |= {"_detokenizer": silent, "_eos_token_ids": set(), "_tokenizer": silent}
        yield from self.code.stream_generate(model, draft, tokenizer, mx.array(prompt), block, tokens)
