"""Muon for matrices, AdamW for everything else, and a learning rate that follows the wall clock."""

import math
import time

import torch
from torch import Tensor, nn


class Clock:
    """The share of a time budget that is spent, and the factor on the learning rate that belongs to it."""

    def __init__(self, seconds: float, warm: float = 0.02, floor: float = 0.02) -> None:
        self.seconds, self.warm, self.floor = seconds, warm, floor
        self.start = time.monotonic()

    def share(self) -> float:
        return min(1.0, (time.monotonic() - self.start) / self.seconds)

    def factor(self) -> float:
        at = self.share()
        return min(1.0, at / self.warm) * max(self.floor, 0.5 * (1 + math.cos(math.pi * at)))


def orthogonal(g: Tensor) -> Tensor:
    """Matrices (N, rows, cols) pushed to orthogonal ones by five Newton-Schulz steps in bfloat16."""
    x = g.bfloat16()
    flip = x.shape[-2] > x.shape[-1]
    x = x.mT if flip else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if flip else x).float()


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised; matrices of one shape are treated together."""

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.01) -> None:
        shapes: dict[torch.Size, list[nn.Parameter]] = {}
        for p in params:
            shapes.setdefault(p.shape, []).append(p)
        defaults = {"lr": lr, "momentum": momentum, "decay": decay}
        super().__init__([{"params": group} for group in shapes.values()], defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = group["params"]
            grads = torch.stack([p.grad for p in params])
            memory = self.state[params[0]]
            if "momentum" not in memory:
                memory["momentum"] = torch.zeros_like(grads)
            memory["momentum"].lerp_(grads, 1 - group["momentum"])
            update = orthogonal(grads.lerp(memory["momentum"], group["momentum"]))
            scale = group["lr"] * max(1.0, params[0].shape[0] / params[0].shape[1]) ** 0.5
            torch._foreach_mul_(params, 1 - group["lr"] * group["decay"])
            torch._foreach_add_(params, list(update.unbind(0)), alpha=-scale)


class Optimizers:
    """Muon at `matrix` and AdamW at `other`, stepped together."""

    def __init__(self, model: nn.Module, matrix: float, other: float, plain: tuple[str, ...], fused: bool) -> None:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        by_muon = [p for n, p in named if p.ndim == 2 and not any(word in n for word in plain)]
        chosen = {id(p) for p in by_muon}
        rest = [p for _, p in named if id(p) not in chosen]
        adam = torch.optim.AdamW(rest, lr=other, betas=(0.9, 0.98), weight_decay=0.0, fused=fused)
        self.parts = [(Muon(by_muon, matrix), matrix), (adam, other)]
        self.params = [p for _, p in named]

    def step(self, factor: float) -> None:
        """Clip the gradients to norm 1, step both, and drop the gradients."""
        nn.utils.clip_grad_norm_(self.params, 1.0, foreach=True)
        for optimizer, rate in self.parts:
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
