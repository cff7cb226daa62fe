"""The gated delta rule in PyTorch: chunked over time for training, and one step for decoding."""

import torch
from torch import Tensor

CHUNK = 64
# A log decay this low at the first token of a chat makes the state forget what came before it.
FORGET = -60.0


def unit_lower_inverse(strict: Tensor) -> Tensor:
    """(I + N)^-1 for strictly lower triangular N of shape (..., 64, 64), float32, by block recursion.

    Blocks of 8 are inverted by a finite product (N^8 = 0), then joined pairwise: no power of a large
    triangular matrix is formed, so nearly equal keys do not cost precision.
    """
    size = strict.shape[-1]
    blocks = torch.stack([strict[..., i : i + 8, i : i + 8] for i in range(0, size, 8)], dim=-3)
    eye = torch.eye(8, device=strict.device, dtype=strict.dtype)
    square = blocks @ blocks
    inverse = (eye - blocks) @ (eye + square) @ (eye + square @ square)
    width = 8
    while width < size:
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        below = torch.stack(
            [strict[..., i + width : i + 2 * width, i : i + width] for i in range(0, size, 2 * width)], dim=-3
        )
        corner = -(second @ below @ first)
        top = torch.cat([first, torch.zeros_like(first)], dim=-1)
        inverse = torch.cat([top, torch.cat([corner, second], dim=-1)], dim=-2)
        width *= 2
    return inverse[..., 0, :, :]


def starts(decay: Tensor, fresh: Tensor) -> Tensor:
    """The state before each chunk, given each chunk's map S -> decay @ S + fresh; a parallel scan over dim -3."""
    span = 1
    count = decay.shape[-3]
    while span < count:
        moved = decay[..., span:, :, :] @ fresh[..., :-span, :, :]
        fresh = torch.cat([fresh[..., :span, :, :], fresh[..., span:, :, :] + moved], dim=-3)
        joined = decay[..., span:, :, :] @ decay[..., :-span, :, :]
        decay = torch.cat([decay[..., :span, :, :], joined], dim=-3)
        span *= 2
    return torch.cat([torch.zeros_like(fresh[..., :1, :, :]), fresh[..., :-1, :, :]], dim=-3)


def chunked(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """Outputs (B, T, H, Dv): q, k (B, T, H, Dk), v (B, T, H, Dv), log decay, beta (B, T, H); T a multiple of 64."""
    b, t, h, _ = q.shape

    def split(x: Tensor) -> Tensor:
        return x.float().reshape(b, t // CHUNK, CHUNK, h, -1).permute(0, 3, 1, 2, 4)

    q, k, v, beta = split(q), split(k), split(v), split(beta)
    total = split(log_decay).cumsum(-2)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    gap = (total - total.transpose(-1, -2)).masked_fill(~lower, float("-inf")).exp()
    since_start, to_end = total.exp(), (total[..., -1:, :] - total).exp()
    solve = unit_lower_inverse((beta * (k @ k.transpose(-1, -2)) * gap).tril(-1))
    own = solve @ (beta * v)
    from_state = solve @ (beta * since_start * k)
    late = (k * to_end).transpose(-1, -2)
    keep = total[..., -1:, :].exp() * torch.eye(k.shape[-1], device=q.device) - late @ from_state
    state = starts(keep, late @ own)
    update = own - from_state @ state
    out = (since_start * q) @ state + ((q @ k.transpose(-1, -2)) * gap) @ update
    return out.permute(0, 2, 3, 1, 4).reshape(b, t, h, -1)


def step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """One token: state (B, H, Dk, Dv), q, k (B, H, Dk), v (B, H, Dv), log decay and beta (B, H) -> output, state."""
    state = state * log_decay.exp()[..., None, None]
    told = torch.einsum("bhkv,bhk->bhv", state, k)
    state = state + k[..., None] * (beta[..., None] * (v - told))[..., None, :]
    return torch.einsum("bhkv,bhk->bhv", state, q), state
