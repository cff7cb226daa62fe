"""Checkpoint configurations, read once from config.json: typed, and loud about what is missing."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_mlx.errors import CheckpointError

FAMILIES = ("qwen3_5", "qwen3", "llama")
_MISSING = object()


class Reader:
    """Typed look-ups in a foreign config; the first of several places that has the key wins."""

    def __init__(self, name: str, *places: Mapping[str, Any] | None) -> None:
        self.name = name
        self.places = [place for place in places if place]
        if not all(isinstance(place, Mapping) for place in self.places):
            raise CheckpointError(f"{name}: config.json holds a value where it should hold an object")

    def find(self, key: str) -> Any:
        """Return the value of the first place that holds `key` with something other than null, else a marker."""
        return next((p[key] for p in self.places if p.get(key) is not None), _MISSING)

    def get(self, key: str, kind: type, default: Any = _MISSING) -> Any:
        """Return `key` as `kind`; raise CheckpointError when it is missing without a default or of another type."""
        value = self.find(key)
        if value is _MISSING:
            if default is _MISSING:
                raise CheckpointError(f"{self.name}: config.json has no {key!r}; the checkpoint is not usable")
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53:
            value = float(value)
        finite = not isinstance(value, float) or math.isfinite(value)
        if not finite or not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise CheckpointError(f"{self.name}: config.json has {key} = {value!r}, expected {kind.__name__}")
        return value

    def positive(self, key: str, default: Any = _MISSING) -> int:
        """Return `key` as an int above zero."""
        value: int = self.get(key, int, default)
        if not 0 < value < 2**31:
            raise CheckpointError(
                f"{self.name}: config.json has {key} = {value}, expected a positive number below 2**31"
            )
        return value


def is_draft(config: Mapping[str, Any]) -> bool:
    """Tell whether a config.json describes a DFlash draft rather than a target."""
    names = config.get("architectures")
    named = isinstance(names, list) and any(str(name).startswith("DFlash") for name in names)
    return "dflash_config" in config or named


def ids_of(name: str, key: str, value: Any) -> tuple[int, ...]:
    """Return token ids given as null, one id or a list of ids; raise CheckpointError for anything else."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in ids):
        raise CheckpointError(f"{name}: {key} is {value!r}, expected a token id or a list of them")
    return tuple(ids)


def _bits(name: str, quantization: Any) -> int | None:
    return None if not quantization else Reader(name, quantization).get("bits", int, None)


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """What the engine needs to know of a target; `bits` is None for unquantized weights."""

    name: str
    family: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    context_length: int
    eos_ids: tuple[int, ...]
    bits: int | None

    @classmethod
    def from_json(cls, config: Mapping[str, Any], name: str) -> "TargetConfig":
        """Read a target's config.json; raise CheckpointError for a draft, custom code, or another family."""
        if is_draft(config):
            raise CheckpointError(f"{name} is a draft, not a target; pass it as the draft (--draft)")
        if config.get("model_file") or config.get("auto_map"):
            raise CheckpointError(f"{name} brings its own Python code, which is never run; use a plain checkpoint")
        text = config.get("text_config") or {}
        read = Reader(name, text, config)  # also proves that `text` is an object
        family = config.get("model_type", "")
        if family not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise CheckpointError(f"{name}: model_type {family!r} is not supported; it must be one of {known}")
        if read.get("num_experts", int, 0):
            raise CheckpointError(f"{name}: mixture-of-experts targets are not supported; use a dense {family} model")
        if "sliding_attention" in read.get("layer_types", list, []):
            raise CheckpointError(f"{name}: targets with sliding-window attention are not supported")
        return cls(
            name=name,
            family=family,
            hidden_size=read.positive("hidden_size"),
            num_layers=read.positive("num_hidden_layers"),
            vocab_size=read.positive("vocab_size"),
            context_length=read.positive("max_position_embeddings", 2**31 - 1),
            eos_ids=ids_of(name, "eos_token_id", config.get("eos_token_id") or text.get("eos_token_id")),
            bits=_bits(name, config.get("quantization") or config.get("quantization_config")),
        )


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """A DFlash draft, version 1 or 2: `conv_kernel` and `selector_rank` are 0 where the part is absent.

    `block_size` counts the anchor. `taps` are 0-based target layers whose outputs feed the draft.
    `causal[i]` says whether block rows of layer i see only earlier block rows; `windows[i]` is 0 for full attention.
    """

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    attention_bias: bool
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    max_positions: int
    block_size: int
    mask_token_id: int
    taps: tuple[int, ...]
    num_target_layers: int
    windows: tuple[int, ...]
    causal: tuple[bool, ...]
    embedding_scale: float
    output_multiplier: float
    softcap: float
    conv_kernel: int
    conv_group: int
    selector_rank: int
    selector_top_k: int
    selector_vocab: int
    quantization: Mapping[str, Any] | None

    @property
    def version(self) -> int:
        """2 when the draft has a candidate selector, else 1."""
        return 2 if self.selector_rank else 1

    @property
    def context_rows(self) -> int | None:
        """Context rows that any layer can see, or None when a full-attention layer sees them all."""
        return None if 0 in self.windows else max(self.windows) - 1

    @classmethod
    def from_json(cls, config: Mapping[str, Any], name: str) -> "DraftConfig":
        """Read a draft's config.json; nested dflash_config values win over top-level ones."""
        if not is_draft(config):
            raise CheckpointError(f"{name} is not a DFlash draft (no dflash_config in config.json)")
        if config.get("model_file"):
            raise CheckpointError(f"{name} brings its own Python code, which is never run; use a plain checkpoint")
        read = Reader(name, config.get("dflash_config"), config)
        layers = read.positive("num_hidden_layers")
        windows = _windows(read, layers)
        taps = ids_of(name, "target_layer_ids", read.get("target_layer_ids", list))
        made = cls(
            name=name,
            num_layers=layers,
            rms_norm_eps=read.get("rms_norm_eps", float),
            attention_bias=read.get("attention_bias", bool, False),
            block_size=read.positive("block_size"),
            mask_token_id=read.get("mask_token_id", int),
            taps=taps,
            num_target_layers=read.positive("num_target_layers", max((*taps, 0)) + 1),
            windows=windows,
            causal=_causal(read, windows),
            embedding_scale=read.get("input_embedding_scale", float, 1.0),
            output_multiplier=read.get("output_multiplier", float, 1.0),
            softcap=read.get("final_logit_softcapping", float, 0.0),
            quantization=config.get("quantization") or config.get("quantization_config"),
            **_shapes(read),
            **_rope(read, config),
        )
        made.check()
        return made

    def check(self) -> None:
        """Raise CheckpointError for values that contradict each other."""
        rules = {
            "target_layer_ids": bool(self.taps) and all(0 <= t < self.num_target_layers for t in self.taps),
            "mask_token_id": 0 <= self.mask_token_id < self.vocab_size,
            "num_key_value_heads": self.num_heads % self.num_kv_heads == 0,
            "conv_group_size": not self.conv_kernel or (self.conv_group > 0 and not self.hidden_size % self.conv_group),
            "selector_top_k": not self.selector_rank or 0 < self.selector_top_k <= self.vocab_size,
            "sliding_window": all(window >= 0 for window in self.windows),
            "rope_theta": self.rope_theta > 0,
            "final_logit_softcapping": self.softcap >= 0,
        }
        for key, ok in rules.items():
            if not ok:
                raise CheckpointError(f"{self.name}: config.json has a {key} that contradicts its other values")


def _windows(read: Reader, layers: int) -> tuple[int, ...]:
    types = read.get("layer_types", list, ["full_attention"] * layers)
    known = {"full_attention", "sliding_attention"}
    if len(types) != layers or not set(types) <= known:
        raise CheckpointError(f"{read.name}: layer_types must list {layers} of {sorted(known)}, not {types}")
    if "sliding_attention" not in types:
        return (0,) * layers
    window = read.positive("sliding_window")
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def _causal(read: Reader, windows: tuple[int, ...]) -> tuple[bool, ...]:
    """An absent `is_causal` means: sliding layers are causal inside the block, full layers are not."""
    stated = read.get("is_causal", bool, read.get("causal", bool, None))
    return tuple(bool(window) if stated is None else stated for window in windows)


def _shapes(read: Reader) -> dict[str, Any]:
    heads, hidden, vocab = (read.positive(key) for key in ("num_attention_heads", "hidden_size", "vocab_size"))
    return {
        "hidden_size": hidden,
        "intermediate_size": read.positive("intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": read.positive("num_key_value_heads"),
        "head_dim": read.positive("head_dim", hidden // heads),
        "vocab_size": vocab,
        "max_positions": read.positive("max_position_embeddings", 2**31 - 1),
        "conv_kernel": read.get("conv_kernel_size", int, 0),
        "conv_group": read.get("conv_group_size", int, 0),
        "selector_rank": read.get("selector_rank", int, 0),
        "selector_top_k": read.get("selector_top_k", int, 0),
        "selector_vocab": read.positive("selector_vocab_size", vocab),
    }


def _rope(read: Reader, config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings stand in rope_parameters, in rope_scaling, or at the top, in that order."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = Reader(read.name, rope, config).get("rope_theta", float)  # also proves that `rope` is an object
    plain = rope.get("rope_type", rope.get("type", "default")) == "default"
    return {"rope_theta": theta, "rope_scaling": None if plain else rope}
