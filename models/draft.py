"""The drafter net: DFlash 1, and DFlash 2 with its dynamic convolutions and its candidate selector."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import initialize_rope

from dflash_mlx.models.config import DraftConfig
from dflash_mlx.models.context import Context, ContextLayer
from dflash_mlx.models.linear import project

MOST_FRESH = 16  # context rows that a block's pass still takes along


class DynamicConv(nn.Module):
    """A causal convolution over block rows around a sublayer, its kernel adjusted row by row.

    `base_kernel` is [2, taps, D]: side 0 before the sublayer, side 1 after it.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.taps, self.group = config.conv_kernel, config.conv_group
        groups = config.hidden_size // self.group
        self.base_kernel = mx.zeros((2, self.taps, config.hidden_size))
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * self.taps * groups, bias=False)

    def kernels(self, x: mx.array) -> mx.array:
        """Return the kernels of both sides for the sublayer's normed input x [1, L, D]: [2, taps, L, D]."""
        delta = project(self.kernel_projection, x).reshape(x.shape[1], 2, self.taps, -1).transpose(1, 2, 0, 3)
        return self.base_kernel[:, :, None, :] + mx.repeat(delta, self.group, axis=-1)


def convolve(x: mx.array, kernel: mx.array) -> mx.array:
    """Return sum over taps of kernel[tap] [L, D] times x [1, L, D] shifted down by tap rows, zeros moving in."""
    rows, (first, *others) = x.shape[1], mx.split(kernel, kernel.shape[0])
    before, out = mx.pad(x, [(0, 0), (len(others), 0), (0, 0)]), first * x
    for tap, side in enumerate(others, start=1):
        start = len(others) - tap
        out = out + side * before[:, start : start + rows]
    return out


class Attention(nn.Module):
    """Attention of block rows over the context and the block; the block's own keys are not kept."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        dim, bias = config.hidden_size, config.attention_bias
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.scale = self.head_dim**-0.5
        self.q_proj = nn.Linear(dim, self.heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(dim, self.kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(dim, self.kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, dim, bias=bias)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        scaling = dict(config.rope_scaling) if config.rope_scaling else None
        self.rope = initialize_rope(self.head_dim, config.rope_theta, False, scaling, config.max_positions)

    def _heads(self, x: mx.array, heads: int) -> mx.array:
        return x.reshape(*x.shape[:2], heads, self.head_dim)

    def keys_values(self, x: mx.array, position: int) -> tuple[mx.array, mx.array]:
        """Return keys and values [1, H, L, D] of rows x [1, L, hidden] standing from `position` on."""
        k = self.k_norm(self._heads(project(self.k_proj, x), self.kv_heads)).transpose(0, 2, 1, 3)
        v = self._heads(project(self.v_proj, x), self.kv_heads).transpose(0, 2, 1, 3)
        return self.rope(k, offset=position), v

    def __call__(self, x: mx.array, fresh: mx.array | None, memory: ContextLayer, mask: mx.array | None) -> mx.array:
        q = self.q_norm(self._heads(project(self.q_proj, x), self.heads)).transpose(0, 2, 1, 3)
        rows, added = (x, 0) if fresh is None else (mx.concatenate([fresh, x], axis=1), fresh.shape[1])
        k, v = memory.extend(*self.keys_values(rows, memory.length), added)
        q = self.rope(q, offset=memory.length)
        out = mx.fast.scaled_dot_product_attention(q, k, v, scale=self.scale, mask=mask)
        return project(self.o_proj, out.transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1))


class MLP(nn.Module):
    """The gated feed-forward sublayer."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return project(self.down_proj, nn.silu(project(self.gate_proj, x)) * project(self.up_proj, x))


class Layer(nn.Module):
    """One drafter layer; DFlash 2 wraps both sublayers in a dynamic convolution."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(config), MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if config.conv_kernel:
            self.attention_conv, self.mlp_conv = DynamicConv(config), DynamicConv(config)

    def __call__(self, x: mx.array, fresh: mx.array | None, memory: ContextLayer, mask: mx.array | None) -> mx.array:
        def attend(h: mx.array) -> mx.array:
            return self.self_attn(h, fresh, memory, mask)

        x = x + _wrapped(self.get("attention_conv"), self.input_layernorm(x), attend)
        return x + _wrapped(self.get("mlp_conv"), self.post_attention_layernorm(x), self.mlp)


def _wrapped(conv: DynamicConv | None, x: mx.array, sublayer: Any) -> mx.array:
    if conv is None:
        return sublayer(x)
    before, after = conv.kernels(x)
    return convolve(sublayer(convolve(x, before)), after)


class Selector(nn.Module):
    """Scores which candidate follows which: pred[previous] · (hidden projection) · succ[candidate]."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.vocab = config.selector_vocab
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)
        self.predecessor_codebook = nn.Embedding(self.vocab, config.selector_rank)
        self.successor_codebook = nn.Embedding(self.vocab, config.selector_rank)

    def __call__(self, hidden: mx.array, anchor: mx.array, candidates: mx.array) -> mx.array:
        """Return pair scores [n, k, k]: entry [i, a, c] is candidate c of row i after candidate a of row i - 1.

        Shapes: hidden [1, n, D], anchor [1], candidates [n, k]. Every `a` of row 0 is the anchor.
        """
        previous = mx.concatenate([mx.broadcast_to(anchor, (1, candidates.shape[1])), candidates[:-1]])
        known = (previous < self.vocab)[..., None]  # an anchor past the codebook has no preferences
        before = self.predecessor_codebook(mx.minimum(previous, self.vocab - 1)) * known
        after = self.successor_codebook(candidates)
        return (before * project(self.hidden_projection, hidden)[0, :, None]) @ after.transpose(0, 2, 1)


class DraftNet(nn.Module):
    """A block-diffusion drafter: embeddings of [anchor, mask, ...] in, hidden rows for the target's head out."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        dim, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(dim * len(config.taps), dim, bias=False)
        self.hidden_norm, self.norm = nn.RMSNorm(dim, eps=eps), nn.RMSNorm(dim, eps=eps)
        self.layers = [Layer(config) for _ in range(config.num_layers)]
        if config.selector_rank:
            self.candidate_selector = Selector(config)

    def new_context(self) -> Context:
        """Return the context of the empty sequence."""
        return Context(self.config.windows)

    def absorb(self, features: mx.array, context: Context) -> None:
        """Append target features [1, L, taps x D], the rows that follow the context, to it.

        Few rows wait for the next block's pass; many, as in prefill, become keys and values at once.
        """
        rows, before = self.hidden_norm(project(self.fc, features.astype(self.dtype))), context.take_fresh()
        if before is not None:
            rows = mx.concatenate([before, rows], axis=1)
        if rows.shape[1] <= MOST_FRESH:
            context.fresh = rows
            return
        for layer, memory in zip(self.layers, context.layers, strict=True):
            memory.append(*layer.self_attn.keys_values(rows, memory.length))

    def __call__(self, embeddings: mx.array, context: Context) -> mx.array:
        """Return final-normed hidden rows [1, L, D] of the block with embeddings [1, L, D], after the context."""
        x = (embeddings * self.config.embedding_scale).astype(self.dtype)
        fresh = context.take_fresh()
        masks = context.masks(x.shape[1], self.config.causal, 0 if fresh is None else fresh.shape[1])
        for layer, memory, mask in zip(self.layers, context.layers, masks, strict=True):
            x = layer(x, fresh, memory, mask)
        return self.norm(x)

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype of its activations: that of its norms, which are never quantized."""
        return self.norm.weight.dtype


def softcapped(logits: mx.array, config: DraftConfig) -> mx.array:
    """Return head logits as the draft was trained on them: multiplied, then soft-capped."""
    logits = logits * config.output_multiplier if config.output_multiplier != 1.0 else logits
    return mx.tanh(logits / config.softcap) * config.softcap if config.softcap else logits


def top_ids(logits: mx.array, k: int, block: int = 128) -> mx.array:
    """Return the ids [n, k] of the k largest of logits [n, V], in no order.

    Wide vocabularies go in two steps, since the k largest lie in the k blocks with the largest maxima.
    """
    rows, width = logits.shape
    if width < 64 * block:
        return mx.argpartition(-logits, kth=k - 1, axis=-1)[:, :k]
    pad = -width % block
    blocks = mx.pad(logits, [(0, 0), (0, pad)], constant_values=-mx.inf).reshape(rows, -1, block)
    best = mx.argpartition(-blocks.max(axis=-1), kth=k - 1, axis=-1)[:, :k]
    ids = (best[..., None] * block + mx.arange(block)).reshape(rows, -1)
    chosen = top_ids(mx.take_along_axis(blocks, best[..., None], axis=1).reshape(rows, -1), k)
    return mx.take_along_axis(ids, chosen, axis=-1)
