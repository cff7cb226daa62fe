"""Let the trained target answer: `sample.py DATA_FOLDER WORK_FOLDER --seconds 60`."""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from data import load_rows
from safetensors.torch import load_file
from shapes import ANSWERED, END_OF_TEXT, IM_END, KINDS, SEED, TEMPERATURES, TargetShape
from target import Target
from torch import Tensor

MIX = (0.4, 0.35, 0.25)
HELD_PER_KIND = 160


def load_target(path: Path, device: str) -> Target:
    """The trained target with its weights rounded to bfloat16, as they will be stored, and frozen."""
    model = Target(TargetShape()).to(device)
    state = load_file(path)
    model.load_state_dict({k: v if k.endswith("A_log") else v.bfloat16().float() for k, v in state.items()})
    return model.eval().requires_grad_(False)


class Sampler:
    """Decodes many prompts at once, one position a step; on a GPU the step is a captured graph."""

    def __init__(self, model: Target, rows: int, length: int) -> None:
        self.model, self.device = model, model.embed_tokens.weight.device.type
        self.tokens = torch.zeros(rows, length, dtype=torch.long, device=self.device)
        self.prompt = torch.ones(rows, dtype=torch.long, device=self.device)
        self.temperature = torch.zeros(rows, 1, device=self.device)
        self.at = torch.zeros(1, dtype=torch.long, device=self.device)
        self.state = model.fresh(rows, length, torch.bfloat16)
        self.graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def step(self) -> None:
        """Read the token at `at` and write the next one, unless the prompt holds it already."""
        with torch.autocast(self.device, torch.bfloat16, cache_enabled=False):
            logits = self.model.one(self.tokens.index_select(1, self.at)[:, 0], self.state, self.at).float()
        # Gumbel noise scaled by the temperature: exact sampling, and plain argmax at 0.
        noise = -torch.empty_like(logits).exponential_().log()
        drawn = (logits + self.temperature * noise).argmax(-1)
        self.at += 1
        known = self.tokens.index_select(1, self.at)[:, 0]
        self.tokens.index_copy_(1, self.at, torch.where(self.at < self.prompt, known, drawn)[:, None])

    def capture(self) -> None:
        for _ in range(2):
            self.step()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.step()

    def run(self, prompts: list[np.ndarray], temperature: np.ndarray) -> Tensor:
        """Token rows (len(prompts), length) on the CPU; what follows an end token is noise."""
        if self.device == "cuda" and self.graph is None:
            self.capture()
        for part in self.state:
            for tensor in part:
                tensor.zero_()
        count = len(prompts)
        rows = np.zeros(self.tokens.shape, np.int64)
        for i, p in enumerate(prompts):
            rows[i, : len(p)] = p
        self.tokens.copy_(torch.from_numpy(rows))
        self.at.zero_()
        self.prompt[:count] = torch.tensor([len(p) for p in prompts], device=self.device)
        self.temperature[:count, 0] = torch.from_numpy(temperature).float().to(self.device)
        for _ in range(self.tokens.shape[1] - 1):
            if self.graph:
                self.graph.replay()
            else:
                self.step()
        return self.tokens[:count].cpu()


def ends(tokens: np.ndarray, prompt: np.ndarray) -> np.ndarray:
    """Lengths of the rows: up to and with the first end token after the prompt."""
    stop = ((tokens == IM_END) | (tokens == END_OF_TEXT)) & (np.arange(tokens.shape[1]) >= prompt[:, None])
    return np.where(stop.any(1), stop.argmax(1) + 1, tokens.shape[1])


def answer(sampler: Sampler, prompts: list[np.ndarray], temperature: np.ndarray) -> dict[str, np.ndarray]:
    """Rows, lengths, prompt lengths and temperatures of one batch."""
    tokens = sampler.run(prompts, temperature).numpy()
    prompt = np.array([len(p) for p in prompts])
    length = ends(tokens, prompt)
    return {"tokens": tokens.astype(np.int16), "length": length, "prompt": prompt, "temperature": temperature}


def held_out(data: Path) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Held-out prompts, once greedy and once at 0.7, with kinds and temperatures."""
    prompts, kinds = load_rows(data / "held.npz"), np.load(data / "held.npz")["kinds"]
    chosen = np.concatenate([np.flatnonzero(kinds == kind)[:HELD_PER_KIND] for kind in KINDS])
    return [prompts[i] for i in chosen] * 2, np.tile(kinds[chosen], 2), np.repeat([0.0, 0.7], len(chosen))


def rounds(prompts: list[np.ndarray], size: int) -> Iterator[tuple[list[np.ndarray], np.ndarray]]:
    """Endless batches of prompts with temperatures drawn from the mix."""
    generator = np.random.default_rng(SEED)
    while True:
        for at in range(0, len(prompts) - size + 1, size):
            yield prompts[at : at + size], generator.choice(TEMPERATURES, size, p=MIX)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--length", type=int, default=ANSWERED)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(SEED)
    start = time.monotonic()
    sampler = Sampler(load_target(args.work / "target.safetensors", device), args.batch, args.length)
    prompts, kinds, temperature = held_out(args.data)
    prompts, kinds, temperature = prompts[: args.batch], kinds[: args.batch], temperature[: args.batch]
    np.savez(args.work / "held-answers.npz", kinds=kinds, **answer(sampler, prompts, temperature))
    print(f"held-out answers after {time.monotonic() - start:.1f} s", flush=True)
    parts = []
    asked = [p for p in load_rows(args.data / "prompts.npz") if len(p) < args.length]
    for batch, drawn in rounds(asked, args.batch):
        parts.append(answer(sampler, batch, drawn))
        if time.monotonic() - start > args.seconds:
            break
    whole = {key: np.concatenate([p[key] for p in parts]) for key in parts[0]}
    np.savez(args.work / "answers.npz", **whole)
    said, ended = (whole["length"] - whole["prompt"]).sum(), (whole["length"] < args.length).mean()
    print(f"{len(whole['length'])} answers, {said} tokens, {ended:.3f} ended, {time.monotonic() - start:.1f} s")


if __name__ == "__main__":
    main()
