"""Mean tau on held-out prompts, by kind and temperature: `evaluate.py WORK_FOLDER`."""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from delta import CHUNK
from drafter import Draft
from objective import Blocks, draft_blocks, scores
from safetensors.torch import load_file
from sample import load_target
from shapes import ID_BITS, KINDS, SAID, SEED, DraftShape
from target import Target
from torch import Tensor
from train_draft import answered_rows

STRIDE = 64
# Name, 0 with the selector or 1 without (greedy only), block size.
VIEWS = (("selector", 0, 8), ("unary", 1, 8), ("block 6", 0, 6), ("block 5", 0, 5), ("block 4", 0, 4))


def load_draft(path: Path, device: str) -> Draft:
    """The trained draft with its weights rounded to bfloat16, as they will be stored."""
    draft = Draft(DraftShape()).to(device)
    draft.load_state_dict({k: v.bfloat16().float() for k, v in load_file(path).items()})
    return draft.eval().requires_grad_(False)


def chances(target: Target, draft: Draft, b: Blocks) -> tuple[Tensor, Tensor]:
    """(M,) chance that each slot's token was a kept draft token, given that it came and all before it were kept.

    Greedy: whether the draft's choice is the token. Sampled: min(1, q / p), because a token that came with
    probability p was accepted with probability min(p, q). Second value: the same greedy test without selector.
    """
    unary, candidates, score = scores(target, draft, b)
    logits = target.lm_head(b.told).float()
    heat = b.temperature.clamp(min=0.1)[:, None]
    q = ((score / heat).softmax(-1) * (candidates == b.label[:, None])).sum(-1)
    p = (logits / heat).softmax(-1).gather(-1, b.label[:, None])[:, 0]
    choice = candidates.gather(-1, score.argmax(-1, keepdim=True))[:, 0]
    kept = torch.where(b.temperature > 0, (q / p).clamp(max=1.0), (choice == b.label).float())
    return torch.where(b.counts, kept, 0.0), ((unary.argmax(-1) == b.label) & b.counts).float()


@torch.no_grad()
def all_chances(target: Target, draft: Draft, rows: list[np.ndarray], heat: Tensor, size: int) -> np.ndarray:
    """(2, rows, T, block - 1): the chances of `chances` for every position as anchor."""
    device = target.lm_head.weight.device.type
    width = -(-max(len(r) for r in rows) // CHUNK) * CHUNK
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    said = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.from_numpy(row & ID_BITS).long()
        said[i, : len(row)] = torch.from_numpy(row >= SAID)
    out = np.zeros((2, len(rows), width, draft.s.block - 1), np.float32)
    for lines in torch.arange(len(rows)).split(size):
        index = torch.arange(width, device=device).expand(len(lines), -1)
        batch = (tokens[lines].to(device), index, said[lines].to(device))
        warm = heat[lines, None].expand(-1, width).to(device)
        for begin in range(1, width, STRIDE):
            anchors = torch.arange(begin, min(begin + STRIDE, width), device=device).expand(len(lines), -1)
            with torch.autocast(device, torch.bfloat16):
                blocks = draft_blocks(target, draft, batch, warm, anchors, torch.ones_like(anchors, dtype=torch.bool))
                both = chances(target, draft, blocks)
            for side, value in enumerate(both):
                shaped = value.view(len(lines), anchors.shape[1], -1)
                out[side, lines.numpy(), begin : begin + STRIDE] = shaped.cpu().numpy()
    return out


def walk(chance: np.ndarray, first: int, length: int, generator: np.random.Generator, block: int) -> tuple[int, int]:
    """Cycles and tokens of decoding one row (T, block - 1) from its first answer token, with `block` - 1 slots."""
    at, cycles = first, 0
    while at < length - 1:
        kept = 0
        while kept < block - 1 and generator.random() < chance[at, kept]:
            kept += 1
        at += kept + 1
        cycles += 1
    return cycles, length - 1 - first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rows", type=int, default=None)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = load_target(args.work / "target.safetensors", device)
    draft = load_draft(args.work / "draft.safetensors", device)
    path = args.work / "held-answers.npz"
    rows, heat = answered_rows(path, args.rows)
    with np.load(path) as file:
        kinds, prompt = file["kinds"][: args.rows], file["prompt"][: args.rows]
    both = all_chances(target, draft, rows, heat, args.batch)
    report: dict[str, dict[str, float]] = {}
    for name, side, block in VIEWS:
        for warmth in (0.0,) if side else (0.0, 0.7):
            generator = np.random.default_rng(SEED)
            sums = {k: np.zeros(2) for k in KINDS}
            for i in np.flatnonzero(np.isclose(heat.numpy(), warmth)):
                sums[kinds[i]] += walk(both[side, i], prompt[i], len(rows[i]), generator, block)
            line = {k: round(float(v[1] / max(v[0], 1)), 3) for k, v in sums.items()}
            line["mean"] = round(float(np.mean(list(line.values()))), 3)
            report[f"{name} T={warmth}"] = line
            print(name, warmth, line, flush=True)
    (args.work / "tau.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
