"""Draft weights from disk: names settled, quantization recognised, nothing missing and nothing left over."""

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from dflash_mlx.errors import CheckpointError, OptionError
from dflash_mlx.models.config import DraftConfig
from dflash_mlx.models.draft import DraftNet

CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")


def load_draft(folder: Path, config: DraftConfig, bits: int | None = None, *, lazy: bool = False) -> DraftNet:
    """Return the draft of a folder of safetensors files; `bits` (4 or 8) quantizes what is stored unquantized.

    float16 weights run as bfloat16, since drafts overflow in float16. Raises CheckpointError for missing, surplus or
    misshapen tensors and OptionError for other `bits`.
    """
    if bits not in (None, 4, 8):
        raise OptionError(f"draft_bits must be 4 or 8, not {bits!r}")
    weights: dict[str, mx.array] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights.update(cast(dict[str, mx.array], mx.load(str(file))))
    weights = {_settled(name): _bfloat16(array) for name, array in weights.items()}
    net = DraftNet(config)
    _quantize_as_stored(net, weights)
    _check(config.name, dict(tree_flatten(net.parameters())), weights)
    net.load_weights(list(weights.items()))
    if bits is not None:
        _quantize(net, bits)
    net.eval()
    if not lazy:
        mx.eval(net.parameters())
    return net


def _settled(name: str) -> str:
    name = name.removeprefix("model.")
    return f"{name}.weight" if name in CODEBOOKS else name


def _bfloat16(array: mx.array) -> mx.array:
    return array.astype(mx.bfloat16) if array.dtype == mx.float16 else array


def _in_dims(module: nn.Module) -> int:
    return int(module.weight.shape[-1])


def _quantize_as_stored(net: DraftNet, weights: Mapping[str, mx.array]) -> None:
    def stored(path: str, module: nn.Module) -> bool | dict[str, int]:
        scales = weights.get(f"{path}.scales")
        if scales is None or not hasattr(module, "to_quantized"):
            return False
        width = _in_dims(module)
        return {"group_size": width // scales.shape[-1], "bits": weights[f"{path}.weight"].shape[-1] * 32 // width}

    nn.quantize(net, class_predicate=stored)


def _quantize(net: DraftNet, bits: int) -> None:
    """Quantize every linear layer and codebook whose width a group of 64 or 32 divides."""

    def chosen(_: str, module: nn.Module) -> bool | dict[str, int]:
        if not hasattr(module, "to_quantized"):
            return False
        group = next((size for size in (64, 32) if _in_dims(module) % size == 0), None)
        return {"group_size": group, "bits": bits} if group else False

    nn.quantize(net, class_predicate=chosen)


def _check(name: str, wanted: Mapping[str, mx.array], found: Mapping[str, mx.array]) -> None:
    for problem, names in (("lacks", wanted.keys() - found.keys()), ("has unknown", found.keys() - wanted.keys())):
        if names:
            shown = ", ".join(sorted(names)[:3])
            raise CheckpointError(f"{name}: the draft's weights {problem} {len(names)} tensors ({shown} ...)")
    for key, array in wanted.items():
        if array.shape != found[key].shape:
            raise CheckpointError(f"{name}: {key} has shape {found[key].shape}, its config.json asks for {array.shape}")
