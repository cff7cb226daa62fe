"""Train the target for a number of seconds: `pretrain.py DATA_FOLDER OUT_FOLDER --seconds 400`."""

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from data import Windows, batches, load_rows
from muon import Clock, Optimizers
from safetensors.torch import save_file
from shapes import SEED, TargetShape
from target import Target
from torch import Tensor

# A prompt's tokens teach the language too, but the answers are what the model will say.
PROMPT_WEIGHT = 0.3


def token_losses(rows: Tensor, head: Tensor, tokens: Tensor, index: Tensor, said: Tensor) -> tuple[Tensor, Tensor]:
    """The weighted loss, and the mean loss of answer tokens, of final rows (B, T, hidden)."""
    logits = F.linear(rows[:, :-1].bfloat16(), head.bfloat16()).flatten(0, 1)
    each = F.cross_entropy(logits.float(), tokens[:, 1:].flatten(), reduction="none")
    follows = (index[:, 1:] > 0).flatten()
    answer = (said[:, 1:].flatten() & follows).float()
    weight = torch.where(answer > 0, 1.0, PROMPT_WEIGHT * follows)
    return (each * weight).sum() / weight.sum(), (each * answer).sum() / answer.sum()


@torch.no_grad()
def validate(model: Target, valid: Windows, size: int) -> float:
    """Mean loss of answer tokens over the held-out chats."""
    device = valid.tokens.device
    losses = []
    for lines in torch.arange(len(valid), device=device).split(size):
        with torch.autocast(device.type, torch.bfloat16):
            batch = valid.batch(lines)
            losses.append(token_losses(model(*batch[:2])[0], model.lm_head.weight, *batch)[1].item())
    return sum(losses) / len(losses)


def settings() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=290)
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--batch", type=int, default=96, help="windows of 1,024 tokens a step")
    parser.add_argument("--rows", type=int, default=None, help="use only so many chats")
    return parser.parse_args()


def train(model: Target, windows: Windows, args: argparse.Namespace) -> None:
    """Train until the clock or the steps run out, printing losses and speed."""
    device = windows.tokens.device.type
    measure = torch.compile(token_losses) if device == "cuda" else token_losses
    optimizers = Optimizers(model, 0.02, 3e-3, ("embed_tokens", "lm_head", "conv1d"), fused=device == "cuda")
    clock, tick, used = Clock(args.seconds), time.monotonic(), 0
    for step, lines in enumerate(batches(len(windows), args.batch, SEED, device)):
        with torch.autocast(device, torch.bfloat16):
            batch = windows.batch(lines)
            loss, answer = measure(model(*batch[:2])[0], model.lm_head.weight, *batch)
        loss.backward()
        optimizers.step(clock.factor())
        if step == 0:
            # The first step compiles; the budget starts after it.
            clock, tick = Clock(args.seconds), time.monotonic()
            continue
        used += lines.numel() * windows.tokens.shape[1]
        if step in (1, 10, 50) or step % 200 == 0:
            rate, line = used / (time.monotonic() - tick), f"step {step} share {clock.share():.3f}"
            print(f"{line} loss {loss.item():.3f} answer {answer.item():.3f} {rate:.0f} tokens/s", flush=True)
        if clock.share() >= 1 or step + 1 >= args.steps:
            print(f"{step + 1} steps, {used} tokens")
            return


def main() -> None:
    args = settings()
    args.out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(SEED)
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 32
    model = Target(TargetShape()).to(device)
    if device == "cuda":
        # Layer by layer: two graphs are compiled and shared, instead of one large one.
        for layer in model.layers:
            layer.compile()
    windows = Windows(load_rows(args.data / "train.npz")[: args.rows], device)
    valid = Windows(load_rows(args.data / "valid.npz")[: args.rows], device)
    size = sum(p.numel() for p in model.parameters())
    print(f"{size} parameters, {len(windows)} windows, {len(valid)} held out", flush=True)
    train(model, windows, args)
    torch.compiler.set_stance("force_eager")
    print(f"held-out answer loss {validate(model, valid, args.batch):.4f}")
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, args.out / "target.safetensors")


if __name__ == "__main__":
    main()
