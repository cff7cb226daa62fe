"""Names or folders to a checked `Pair`: everything that can be refused is refused before a weight is read."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from dflash_mlx import fit, hub
from dflash_mlx.checkpoint import Checkpoint
from dflash_mlx.errors import CheckpointError
from dflash_mlx.models import DraftConfig, DraftNet, Target, TargetConfig, build_target, load_draft, to_host
from dflash_mlx.models.presets import Preset
from dflash_mlx.pairing import AS_STORED, Found, fetch, find, needed, request
from dflash_mlx.text import Tokenizer
from dflash_mlx.types import Sampling

T = TypeVar("T")
_HOST_FROM = 1 << 18  # weights in the largest matrix from which numpy's BLAS gains more than its calls cost
_TIP = "--draft-bits 4 is usually faster"
_WIDEN_LIMIT = 4_000_000_000  # bytes in float32 up to which a model is widened on the CPU


@dataclass(frozen=True)
class Pair:
    """A target and its draft, loaded and known to belong together; `draft` is None for plain decoding.

    `sampling` and `sampling_plain` (reasoning off) are the preset's defaults, greedy without a preset.
    """

    name: str
    target: Target
    draft: DraftNet | None
    tokenizer: Tokenizer
    target_config: TargetConfig
    draft_config: DraftConfig | None
    model_id: str
    draft_id: str | None
    revision: str | None
    sampling: Sampling
    sampling_plain: Sampling
    stop_ids: frozenset[int]
    notices: tuple[str, ...] = ()


def load(
    pair: str | None = None, *, model: str | None = None, draft: str | None = None, revision: str | None = None,
    draft_revision: str | None = None, draft_bits: int | None = None, speculate: bool = True,
    progress: hub.Progress | None = None, lazy: bool = False, widen: bool = True,
) -> Pair:  # fmt: skip
    """Load a preset by name, or `model` with `draft` (folders or hub ids), downloading only what is not here.

    `draft_bits` 4 or 8 quantizes the draft (16 leaves it as stored); `progress` hears of downloads. `lazy` leaves
    weights on disk until first used and asks for no memory; `widen` lets small quantized weights run dense on a CPU.
    Raises OptionError, CheckpointError, PairError or ResourceError, each one line.
    """
    asked, notices = request(pair, model, draft, revision, draft_revision, draft_bits, speculate)
    found = find(asked)
    if not lazy:
        fit.require_memory(asked.name, needed(found, asked.draft_bits), fit.memory())
    found = fetch(asked.name, found, progress)
    return _build(asked, found, list(notices), lazy, widen)


def _build(asked: Preset, found: Found, notices: list[str], lazy: bool, widen: bool) -> Pair:
    model, tokenizer = _load_target(found.target)
    widened = widen and not lazy and _widen(model, found.target, notices)
    config = found.target_config
    net = _load_draft(found, asked.draft_bits, lazy)
    if net is not None and found.draft_config is not None:
        if widen and not lazy:
            _widen(net, found.draft, notices)
        if config.bits and not (widened or found.draft_config.quantization or asked.draft_bits in (4, 8)):
            notices.append(f"{asked.draft} runs unquantized beside a {config.bits}-bit target; {_TIP}")
    target = build_target(model, config)
    if not lazy:
        mx.eval(model.parameters(), net.parameters() if net else [])
    return Pair(
        name=asked.name,
        target=target,
        draft=net,
        tokenizer=Tokenizer(tokenizer, config.vocab_size),
        target_config=config,
        draft_config=found.draft_config,
        model_id=found.target.name,
        draft_id=found.draft.name if found.draft else None,
        revision=found.target.commit,
        sampling=asked.sampling,
        sampling_plain=asked.sampling_plain,
        stop_ids=frozenset({*config.eos_ids, *tokenizer.eos_token_ids}),
        notices=tuple(notices),
    )


def _load_target(target: Checkpoint) -> tuple[nn.Module, Any]:
    from mlx_lm.utils import load_model, load_tokenizer

    model, config = _guarded(target.name, lambda: load_model(target.folder, lazy=True))
    options = {"trust_remote_code": False}  # a tokenizer's own Python is refused like a model's
    stops = config.get("eos_token_id")
    tokenizer = _guarded(target.name, lambda: load_tokenizer(target.folder, options, eos_token_ids=stops))
    # Prompts too long are refused by name elsewhere; transformers would warn of them first, in words of its own.
    tokenizer._tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return model, tokenizer


def _load_draft(found: Found, bits: int | None, lazy: bool) -> DraftNet | None:
    if found.draft is None or found.draft_config is None:
        return None
    folder, config, wanted = found.draft.folder, found.draft_config, None if bits == AS_STORED else bits
    return _guarded(found.draft.name, lambda: load_draft(folder, config, wanted, lazy=lazy))


def _guarded(name: str, work: Callable[[], T]) -> T:
    """Run a library's loader; raise CheckpointError in one line for whatever it finds wrong."""
    try:
        return work()
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RuntimeError,
        ImportError,
        OverflowError,
    ) as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        if isinstance(error, KeyError):  # its text is the bare key
            reason = f"a file lacks {reason}"
        raise CheckpointError(f"{name} cannot be loaded: {reason}") from error


def _widen(model: nn.Module, part: Checkpoint | None, notices: list[str]) -> bool:
    """Let a small model run in float32 on a CPU, where that is faster; True when its weights were quantized."""
    from mlx_lm.utils import dequantize_model

    if part is None or mx.default_device() != mx.Device(mx.cpu):
        return False
    kinds = (nn.QuantizedLinear, nn.QuantizedEmbedding)
    bits = sorted({module.bits for module in model.modules() if isinstance(module, kinds)})
    if part.weight_bytes * 32 / (bits[0] if bits else 16) > _WIDEN_LIMIT:
        return False
    if bits:
        dequantize_model(model)
        stored = " and ".join(f"{each}-bit" for each in bits)
        notices.append(f"{part.name}: {stored} weights run as dense ones, which are faster on this CPU")
    if max(array.size for _, array in tree_flatten(model.parameters())) >= _HOST_FROM:
        to_host(model)
    return bool(bits)
