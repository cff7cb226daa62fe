"""The DFlash 2 draft in PyTorch, with the parameter names of the published checkpoints."""

import torch
import torch.nn.functional as F
from shapes import DraftShape
from target import Mlp, Norm, linear, rope
from torch import Tensor, nn


class GroupedConv(nn.Module):
    """Convolution over the rows of a block whose kernel is a base plus a part computed from the input, per group."""

    def __init__(self, s: DraftShape) -> None:
        super().__init__()
        self.taps, self.groups, self.size, self.block = s.conv_kernel, s.hidden // s.conv_group, s.conv_group, s.block
        base = torch.zeros(2, s.conv_kernel, s.hidden)
        base[:, 0] = 1.0
        self.base_kernel = nn.Parameter(base)
        self.kernel_projection = linear(s.hidden, 2 * s.conv_kernel * self.groups)
        nn.init.zeros_(self.kernel_projection.weight)

    def kernels(self, x: Tensor) -> Tensor:
        """(B, rows, side, tap, hidden) from the normed input x (B, rows, hidden)."""
        delta = self.kernel_projection(x).unflatten(-1, (2, self.taps, self.groups))
        return self.base_kernel + delta.repeat_interleave(self.size, dim=-1)

    def apply_side(self, x: Tensor, kernels: Tensor, side: int) -> Tensor:
        """Mix each row with the rows before it in its own block; x (B, blocks * L, hidden)."""
        rows = x.unflatten(1, (-1, self.block))
        kernel = kernels[:, :, side].unflatten(1, (-1, self.block))
        out = kernel[..., 0, :] * rows
        for back in range(1, self.taps):
            moved = F.pad(rows, (0, 0, back, 0))[:, :, : self.block]
            out = out + kernel[..., back, :] * moved
        return out.flatten(1, 2)


class BlockAttention(nn.Module):
    """Attention of block rows over context rows and the block itself."""

    def __init__(self, s: DraftShape) -> None:
        super().__init__()
        self.s = s
        self.q_proj = linear(s.hidden, s.heads * s.head_dim)
        self.k_proj, self.v_proj = (linear(s.hidden, s.kv_heads * s.head_dim) for _ in range(2))
        self.o_proj = linear(s.heads * s.head_dim, s.hidden)
        self.q_norm, self.k_norm = Norm(s.head_dim, s.eps), Norm(s.head_dim, s.eps)

    def forward(self, x: Tensor, context: Tensor, at: Tensor, context_at: Tensor, mask: Tensor) -> Tensor:
        s = self.s
        both, both_at = torch.cat([context, x.to(context.dtype)], dim=1), torch.cat([context_at, at], dim=1)
        q = self.q_norm(self.q_proj(x).unflatten(-1, (s.heads, -1))).transpose(1, 2)
        k = self.k_norm(self.k_proj(both).unflatten(-1, (s.kv_heads, -1))).transpose(1, 2)
        v = self.v_proj(both).unflatten(-1, (s.kv_heads, -1)).transpose(1, 2)
        q = rope(q, at[:, None], s.head_dim, s.theta).to(v.dtype)
        k = rope(k, both_at[:, None], s.head_dim, s.theta).to(v.dtype)
        share = s.heads // s.kv_heads
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class DraftLayer(nn.Module):
    def __init__(self, s: DraftShape) -> None:
        super().__init__()
        self.attention_conv, self.mlp_conv = GroupedConv(s), GroupedConv(s)
        self.input_layernorm, self.post_attention_layernorm = Norm(s.hidden, s.eps), Norm(s.hidden, s.eps)
        self.self_attn = BlockAttention(s)
        self.mlp = Mlp(s.hidden, s.intermediate)

    def forward(self, x: Tensor, context: Tensor, at: Tensor, context_at: Tensor, mask: Tensor) -> Tensor:
        y = self.input_layernorm(x)
        kernels = self.attention_conv.kernels(y)
        y = self.attention_conv.apply_side(y, kernels, 0)
        y = self.self_attn(y, context, at, context_at, mask)
        x = x + self.attention_conv.apply_side(y, kernels, 1)
        y = self.post_attention_layernorm(x)
        kernels = self.mlp_conv.kernels(y)
        y = self.mlp(self.mlp_conv.apply_side(y, kernels, 0))
        return x + self.mlp_conv.apply_side(y, kernels, 1)


class Selector(nn.Module):
    """Re-scores the best candidates of a row, given the token before it."""

    def __init__(self, s: DraftShape) -> None:
        super().__init__()
        self.hidden_projection = linear(s.hidden, s.rank)
        self.predecessor_codebook = nn.Parameter(torch.randn(s.vocab, s.rank) * 0.02)
        self.successor_codebook = nn.Parameter(torch.zeros(s.vocab, s.rank))
        nn.init.normal_(self.hidden_projection.weight, std=0.02)

    def forward(self, rows: Tensor, previous: Tensor, candidates: Tensor, unary: Tensor) -> Tensor:
        """Scores (..., k) of candidates (..., k) with unary logits (..., k), after the token `previous` (...)."""
        bridge = self.predecessor_codebook[previous] * self.hidden_projection(rows).float()
        return unary + (self.successor_codebook[candidates] * bridge[..., None, :]).sum(-1)


class Draft(nn.Module):
    def __init__(self, s: DraftShape) -> None:
        super().__init__()
        self.s = s
        self.fc = linear(len(s.taps) * s.hidden, s.hidden)
        self.hidden_norm, self.norm = Norm(s.hidden, s.eps), Norm(s.hidden, s.eps)
        self.layers = nn.ModuleList(DraftLayer(s) for _ in range(s.layers))
        self.candidate_selector = Selector(s)

    def forward(self, features: Tensor, block: Tensor, at: Tensor, context_at: Tensor, mask: Tensor) -> Tensor:
        """Normed rows (B, blocks * L, hidden) of embedded blocks, given tap features (B, T, taps * hidden).

        Positions `at` (B, blocks * L) and `context_at` (B, T); mask (B, 1, blocks * L, T + blocks * L), True = visible.
        """
        context = self.hidden_norm(self.fc(features))
        for layer in self.layers:
            block = layer(block, context, at, context_at, mask)
        return self.norm(block)


def block_mask(chat: Tensor, index: Tensor, anchors: Tensor, s: DraftShape) -> Tensor:
    """What block rows see: their own block, and their chat's context strictly before the anchor, inside the window.

    chat, index (B, T): which chat a token belongs to and its place there; anchors (B, N): positions in the row.
    Returns (B, 1, N * L, T + N * L) bool.
    """
    b, n = anchors.shape
    length = chat.shape[1]
    offset = torch.arange(s.block, device=chat.device)
    place = torch.arange(length, device=chat.device)
    row = (anchors[..., None] + offset).flatten(1)
    anchor = anchors.repeat_interleave(s.block, dim=1)
    same = chat.gather(1, anchor)[..., None] == chat[:, None, :]
    context = same & (place < anchor[..., None]) & (place > row[..., None] - s.window)
    block = torch.arange(n, device=chat.device).repeat_interleave(s.block)
    own = (block[:, None] == block[None, :]).expand(b, -1, -1)
    return torch.cat([context, own], dim=2)[:, None]
