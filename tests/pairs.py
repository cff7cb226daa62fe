"""Small trained checkpoints for the tests, each loaded once a session."""

import functools
import gzip
import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import load_model

from dflash_mlx.decode import decode
from dflash_mlx.models import DraftConfig, DraftNet, Target, TargetConfig, build_target, load_draft
from dflash_mlx.sampling import Sampler
from dflash_mlx.types import Cycle, Options

DATA = Path(__file__).parent / "data"
CHECKPOINTS = DATA / "checkpoints"


def config_of(name: str) -> dict:
    return json.loads((CHECKPOINTS / name / "config.json").read_text())


@functools.cache
def model_of(name: str) -> nn.Module:
    return load_model(CHECKPOINTS / name)[0]


@functools.cache
def target_of(name: str) -> Target:
    return build_target(model_of(name), TargetConfig.from_json(config_of(name), name))


@functools.cache
def draft_of(name: str) -> DraftNet:
    """A draft folder's net; `NAME-bf16` is the same net with every weight cast."""
    folder = name.removesuffix("-bf16")
    net = load_draft(CHECKPOINTS / folder, DraftConfig.from_json(config_of(folder), name))
    if name != folder:
        net.set_dtype(mx.bfloat16)
    return net


@functools.cache
def runs_of(target: str) -> dict:
    return json.loads(gzip.decompress((DATA / "goldens" / f"runs-{target}.json.gz").read_bytes()))


def prompt_of(target: str, name: str) -> list[int]:
    return runs_of(target)["greedy"][name]["prompt"]


def run(target: Target, net: DraftNet | None, prompt: list[int], options: Options, stop=(), block=1) -> list[Cycle]:
    sampler = Sampler(options.sampling)
    return list(decode(target, net, prompt, options, set(stop), sampler, block))


def ids_of(cycles: list[Cycle]) -> list[int]:
    return [token for cycle in cycles for token in cycle.tokens]
