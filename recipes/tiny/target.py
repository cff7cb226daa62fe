"""The target in PyTorch, with the parameter names and the arithmetic of mlx-lm's `qwen3_5`."""

import delta
import torch
import torch.nn.functional as F
from shapes import TargetShape
from torch import Tensor, nn


class Norm(nn.Module):
    """RMS norm with a plain multiplier, in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


def linear(rows: int, cols: int) -> nn.Linear:
    """A bias-free map from `rows` to `cols` features."""
    return nn.Linear(rows, cols, bias=False)


def rope(x: Tensor, position: Tensor, dims: int, theta: float) -> Tensor:
    """Rotate the first `dims` features of x (..., T, D) by position (..., T), halves paired."""
    half = dims // 2
    rate = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = position[..., None].float() * rate
    cos, sin = angle.cos(), angle.sin()
    a, b, rest = x[..., :half].float(), x[..., half:dims].float(), x[..., dims:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest.float()], dim=-1).to(x.dtype)


class Mlp(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = linear(hidden, intermediate), linear(hidden, intermediate)
        self.down_proj = linear(intermediate, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(nn.Module):
    """Full attention whose output is gated; only the first quarter of each head is rotated."""

    def __init__(self, s: TargetShape) -> None:
        super().__init__()
        self.s = s
        self.q_proj = linear(s.hidden, s.heads * s.head_dim * 2)
        self.k_proj, self.v_proj = (linear(s.hidden, s.kv_heads * s.head_dim) for _ in range(2))
        self.o_proj = linear(s.heads * s.head_dim, s.hidden)
        self.q_norm, self.k_norm = Norm(s.head_dim, s.eps), Norm(s.head_dim, s.eps)

    def project(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys, values (B, heads, T, D) and the gate (B, T, heads * D) of x (B, T, hidden)."""
        b, t, _ = x.shape
        s = self.s
        q, gate = self.q_proj(x).view(b, t, s.heads, -1).chunk(2, dim=-1)
        k, v = self.k_proj(x).view(b, t, s.kv_heads, -1), self.v_proj(x).view(b, t, s.kv_heads, -1)
        dims, at = int(s.head_dim * s.rotary), position[:, None]
        q = rope(self.q_norm(q).transpose(1, 2), at, dims, s.theta)
        k = rope(self.k_norm(k).transpose(1, 2), at, dims, s.theta)
        return q.to(v.dtype), k.to(v.dtype), v.transpose(1, 2), gate.reshape(b, t, -1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, mask: Tensor) -> Tensor:
        share = self.s.heads // self.s.kv_heads
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(gate.shape)
        return self.o_proj(out * gate.sigmoid())

    def forward(self, x: Tensor, position: Tensor, mask: Tensor) -> Tensor:
        return self.attend(*self.project(x, position), mask)

    def fresh(self, rows: int, length: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        """Empty keys and values for `rows` sequences of `length` tokens."""
        s = self.s
        return [torch.zeros(rows, s.kv_heads, length, s.head_dim, device=device, dtype=dtype) for _ in range(2)]

    def one(self, x: Tensor, state: list[Tensor], at: Tensor) -> Tensor:
        """One token x (B, 1, hidden) at position `at` (1,), written into the state in place."""
        q, k, v, gate = self.project(x, at.expand(x.shape[0], 1))
        state[0].index_copy_(2, at, k)
        state[1].index_copy_(2, at, v)
        seen = torch.arange(state[0].shape[2], device=x.device) <= at
        # Query heads grouped by the key head they share: the cache is read once and never copied.
        q = q.reshape(x.shape[0], self.s.kv_heads, -1, self.s.head_dim) * self.s.head_dim**-0.5
        weight = (q @ state[0].mT).float().masked_fill(~seen, float("-inf")).softmax(-1)
        out = (weight.to(v.dtype) @ state[1]).reshape(gate.shape)
        return self.o_proj(out * gate.sigmoid())


class GatedNorm(Norm):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * F.silu(gate.float())


class DeltaNet(nn.Module):
    """The recurrent layer: short convolution, gated delta rule, gated norm."""

    def __init__(self, s: TargetShape) -> None:
        super().__init__()
        self.s = s
        keys, values = s.key_heads * s.key_dim, s.value_heads * s.value_dim
        self.sizes = [keys, keys, values]
        self.in_proj_qkv, self.in_proj_z = linear(s.hidden, 2 * keys + values), linear(s.hidden, values)
        self.in_proj_b, self.in_proj_a = linear(s.hidden, s.value_heads), linear(s.hidden, s.value_heads)
        self.conv1d = nn.Parameter(torch.randn(2 * keys + values, s.conv_kernel) * 0.3)
        # Half lives from about one token to about 700.
        self.A_log = nn.Parameter(torch.linspace(-1.0, 2.0, s.value_heads))
        self.dt_bias = nn.Parameter(torch.full((s.value_heads,), -4.0))
        self.norm = GatedNorm(s.value_dim, s.eps)
        self.out_proj = linear(values, s.hidden)

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Log decay and beta, float32, of x (..., hidden)."""
        a = self.in_proj_a(x).float() + self.dt_bias
        return -self.A_log.exp() * F.softplus(a), self.in_proj_b(x).float().sigmoid()

    def heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Normalised q and k and plain v, (..., value heads, D), of the convolution's output."""
        s = self.s
        q, k, v = F.silu(mixed).split(self.sizes, dim=-1)
        share = s.value_heads // s.key_heads
        q, k = (x.unflatten(-1, (s.key_heads, s.key_dim)).float() for x in (q, k))
        q = F.rms_norm(q, (s.key_dim,), eps=1e-6 / s.key_dim) / s.key_dim
        k = F.rms_norm(k, (s.key_dim,), eps=1e-6 / s.key_dim) * s.key_dim**-0.5
        q, k = (x.repeat_interleave(share, dim=-2) for x in (q, k))
        return q, k, v.unflatten(-1, (s.value_heads, s.value_dim)).float()

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        """x (B, T, hidden); index (B, T) counts from the start of each chat, where state and convolution begin anew."""
        qkv = self.in_proj_qkv(x)
        mixed = qkv * self.conv1d[:, -1]
        for back in range(1, self.s.conv_kernel):
            moved = F.pad(qkv, (0, 0, back, 0))[:, : qkv.shape[1]]
            mixed = mixed + torch.where((index >= back)[..., None], moved, 0) * self.conv1d[:, -1 - back]
        q, k, v = self.heads(mixed)
        log_decay, beta = self.gates(x)
        log_decay = torch.where((index == 0)[..., None], delta.FORGET, log_decay)
        out = delta.chunked(q, k, v, log_decay, beta)
        z = self.in_proj_z(x).unflatten(-1, out.shape[-2:])
        return self.out_proj(self.norm(out, z).flatten(-2).to(x.dtype))

    def fresh(self, rows: int, length: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        """An empty convolution window and an empty float32 state (the length does not matter)."""
        s = self.s
        window = torch.zeros(rows, s.conv_kernel, sum(self.sizes), device=device, dtype=dtype)
        return [window, torch.zeros(rows, s.value_heads, s.key_dim, s.value_dim, device=device)]

    def one(self, x: Tensor, state: list[Tensor], at: Tensor) -> Tensor:
        """One token x (B, 1, hidden), written into the state in place."""
        row = x[:, 0]
        state[0].copy_(torch.cat([state[0][:, 1:], self.in_proj_qkv(x)], dim=1))
        q, k, v = self.heads((state[0] * self.conv1d.T).sum(1))
        out, new = delta.step(state[1], q, k, v, *self.gates(row))
        state[1].copy_(new)
        z = self.in_proj_z(row).unflatten(-1, out.shape[-2:])
        return self.out_proj(self.norm(out, z).flatten(-2).to(x.dtype))[:, None]


class Layer(nn.Module):
    def __init__(self, s: TargetShape, index: int) -> None:
        super().__init__()
        self.full = (index + 1) % s.interval == 0
        if self.full:
            self.self_attn = Attention(s)
        else:
            self.linear_attn = DeltaNet(s)
        self.input_layernorm, self.post_attention_layernorm = Norm(s.hidden, s.eps), Norm(s.hidden, s.eps)
        self.mlp = Mlp(s.hidden, s.intermediate)

    def forward(self, x: Tensor, index: Tensor, mask: Tensor) -> Tensor:
        y = self.input_layernorm(x)
        x = x + (self.self_attn(y, index, mask) if self.full else self.linear_attn(y, index))
        return x + self.mlp(self.post_attention_layernorm(x))

    @property
    def mixer(self) -> Attention | DeltaNet:
        return self.self_attn if self.full else self.linear_attn

    def one(self, x: Tensor, state: list[Tensor], at: Tensor) -> Tensor:
        x = x + self.mixer.one(self.input_layernorm(x), state, at)
        return x + self.mlp(self.post_attention_layernorm(x))


def chat_mask(index: Tensor) -> Tensor:
    """(B, 1, T, T) bool: causal, and never across the start of a chat."""
    chat = (index == 0).cumsum(1)
    return ((chat[:, :, None] == chat[:, None, :]).tril())[:, None]


class Target(nn.Module):
    def __init__(self, s: TargetShape) -> None:
        super().__init__()
        self.s = s
        self.embed_tokens = nn.Embedding(s.vocab, s.hidden)
        self.layers = nn.ModuleList(Layer(s, i) for i in range(s.layers))
        self.norm = Norm(s.hidden, s.eps)
        self.lm_head = linear(s.hidden, s.vocab)
        nn.init.normal_(self.embed_tokens.weight, std=0.5)
        nn.init.normal_(self.lm_head.weight, std=0.02)
        for layer in self.layers:
            for last in (layer.mlp.down_proj, layer.self_attn.o_proj if layer.full else layer.linear_attn.out_proj):
                last.weight.data *= 0.1

    def forward(self, tokens: Tensor, index: Tensor, taps: tuple[int, ...] = ()) -> tuple[Tensor, list[Tensor]]:
        """The final normed rows (B, T, hidden) and the outputs of the tapped layers."""
        mask = chat_mask(index)
        x = self.embed_tokens(tokens)
        seen = []
        for i, layer in enumerate(self.layers):
            x = layer(x, index, mask)
            if i in taps:
                seen.append(x)
        return self.norm(x), seen

    def fresh(self, rows: int, length: int, dtype: torch.dtype) -> list[list[Tensor]]:
        device = self.embed_tokens.weight.device
        return [layer.mixer.fresh(rows, length, device, dtype) for layer in self.layers]

    def one(self, token: Tensor, state: list[list[Tensor]], at: Tensor) -> Tensor:
        """Logits (B, vocab) after one more token (B,) at position `at` (1,)."""
        x = self.embed_tokens(token)[:, None]
        for layer, part in zip(self.layers, state, strict=True):
            x = layer.one(x, part, at)
        return self.lm_head(self.norm(x))[:, 0]
