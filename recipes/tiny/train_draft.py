"""Train the draft on the target's own answers: `train_draft.py WORK_FOLDER --seconds 300`."""

import argparse
from pathlib import Path

import numpy as np
import torch
from data import Windows, batches
from drafter import Draft
from muon import Clock, Optimizers
from objective import draft_blocks, eligible_anchors, losses, random_anchors
from safetensors.torch import save_file
from sample import load_target
from shapes import SAID, SEED, DraftShape
from target import Target
from torch import Tensor

# Expected acceptance joins the losses in the second half, once the candidates are good.
ACCEPT_FROM, ACCEPT_WEIGHT = 0.4, 1.0
PLAIN = ("codebook", "base_kernel", "kernel_projection", "hidden_projection")


def answered_rows(path: Path, limit: int | None) -> tuple[list[np.ndarray], Tensor]:
    """Rows with only the sampled answer marked as said, and each row's temperature."""
    with np.load(path) as file:
        tokens, length, prompt = file["tokens"][:limit], file["length"][:limit], file["prompt"][:limit]
        temperature = torch.from_numpy(file["temperature"][:limit]).float()
    place = np.arange(tokens.shape[1])
    marked = tokens.astype(np.uint16) | np.where(place >= prompt[:, None], np.uint16(SAID), np.uint16(0))
    return [row[:n] for row, n in zip(marked, length, strict=True)], temperature


def settings() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--seconds", type=float, default=190)
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--batch", type=int, default=48, help="windows of 1,024 tokens a step")
    parser.add_argument("--anchors", type=int, default=128, help="blocks a window")
    parser.add_argument("--rows", type=int, default=None, help="use only so many answers")
    return parser.parse_args()


def train(target: Target, draft: Draft, windows: Windows, heat: Tensor, args: argparse.Namespace) -> None:
    """Train until the clock or the steps run out; heat (lines, T) is each token's sampling temperature."""
    device = windows.tokens.device.type
    measure = torch.compile(losses) if device == "cuda" else losses
    optimizers = Optimizers(draft, 0.02, 2e-3, PLAIN, fused=device == "cuda")
    clock = Clock(args.seconds)
    for step, lines in enumerate(batches(len(windows), args.batch, SEED, device)):
        batch = windows.batch(lines)
        anchors, good = random_anchors(eligible_anchors(*batch[1:]), args.anchors)
        with torch.autocast(device, torch.bfloat16):
            blocks = draft_blocks(target, draft, batch, heat[lines], anchors, good)
            unary, selector, accepted, found = measure(target, draft, blocks)
        share = clock.share()
        accept_weight = ACCEPT_WEIGHT * min(1.0, max(0.0, (share - ACCEPT_FROM) / 0.1))
        (unary + selector - accept_weight * accepted).backward()
        optimizers.step(clock.factor())
        if step == 0:
            # The first step compiles; the budget starts after it.
            clock = Clock(args.seconds)
            continue
        if step in (1, 10, 50) or step % 250 == 0:
            tau = 1 + accepted.item() * (draft.s.block - 1)
            line = f"step {step} share {share:.3f} unary {unary.item():.3f} selector {selector.item():.3f}"
            print(f"{line} expected tau {tau:.3f} recall {found.item():.3f}", flush=True)
        if share >= 1 or step + 1 >= args.steps:
            print(f"{step + 1} steps of {args.batch} x {args.anchors} blocks")
            return


def main() -> None:
    args = settings()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(SEED)
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 32
    target, draft = load_target(args.work / "target.safetensors", device), Draft(DraftShape()).to(device)
    if device == "cuda":
        for layer in (*target.layers, *draft.layers):
            layer.compile()
    rows, temperature = answered_rows(args.work / "answers.npz", args.rows)
    windows = Windows(rows, device)
    size = sum(p.numel() for p in draft.parameters())
    print(f"{size} parameters, {len(rows)} rows, {len(windows)} windows", flush=True)
    train(target, draft, windows, temperature.to(device)[windows.owner], args)
    save_file({k: v.contiguous() for k, v in draft.state_dict().items()}, args.work / "draft.safetensors")


if __name__ == "__main__":
    main()
