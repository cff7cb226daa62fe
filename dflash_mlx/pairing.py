"""Which two checkpoints were asked for, and whether they belong together: all of it before a weight is read."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dflash_mlx import checkpoint, fit, hub
from dflash_mlx.checkpoint import Checkpoint
from dflash_mlx.errors import OptionError, PairError
from dflash_mlx.models.config import DraftConfig, Reader, TargetConfig, ids_of
from dflash_mlx.models.presets import FLAGSHIP, TINY, Preset, preset, presets

Json = Mapping[str, Any]
AS_STORED = 16  # the draft_bits that leave a draft as it is, where a preset would quantize it


@dataclass(frozen=True, slots=True)
class Found:
    """Both checkpoints, located and seen to match from their config.json alone."""

    target: Checkpoint
    draft: Checkpoint | None
    target_config: TargetConfig
    draft_config: DraftConfig | None

    @property
    def parts(self) -> tuple[Checkpoint, ...]:
        """The checkpoints there are."""
        return (self.target, self.draft) if self.draft else (self.target,)


def request(
    pair: str | None, model: str | None, draft: str | None, revision: str | None = None,
    draft_revision: str | None = None, draft_bits: int | None = None, speculate: bool = True,
) -> tuple[Preset, tuple[str, ...]]:  # fmt: skip
    """Resolve names to what is to be loaded, and notices; raise OptionError for options that contradict each other."""
    if draft_bits not in (None, 4, 8, AS_STORED):
        raise OptionError(f"draft_bits must be 4 or 8 (or {AS_STORED}, as stored), not {draft_bits!r}")
    if pair is not None and (model or draft or revision or draft_revision):
        raise OptionError("a pair by name brings its model, draft and revisions; give --pair, or --model with --draft")
    if model is None and (draft or revision or draft_revision):
        raise OptionError("a draft or a revision needs a model beside it (--model)")
    notices: tuple[str, ...] = ()
    if model is not None:
        made = Preset(model, model, draft, revision=revision, draft_revision=draft_revision)
        notices = () if draft or not speculate else (f"{model} has no draft beside it: plain decoding{_hint(model)}",)
    elif pair is not None:
        made = preset(pair)
    else:
        made, why = default_preset()
        notices = (why,)
    made = replace(made, draft_bits=draft_bits or made.draft_bits)
    return made if speculate else replace(made, draft=None), notices


def _hint(model: str) -> str:
    names = [known.name for known in presets().values() if known.model == model]
    return f" (--pair {names[0]} has one)" if names else ""


def default_preset() -> tuple[Preset, str]:
    """Return the flagship on Apple Silicon with enough memory, else `tiny`, and one line that says why."""
    wanted = preset(FLAGSHIP).need_bytes or 0
    if fit.is_apple_silicon() and wanted <= fit.memory().usable:
        return preset(FLAGSHIP), f"pair: {FLAGSHIP} (the default on this machine)"
    lacking = f"{FLAGSHIP} needs Apple Silicon and {fit.gb(wanted)} of memory"
    return preset(TINY), f"pair: {TINY} (the default here; {lacking})"


def find(asked: Preset) -> Found:
    """Locate both checkpoints and check from config.json alone that they are a supported pair."""
    target = checkpoint.find(asked.model, asked.revision, draft=False, embedded=asked.embedded)
    target_config = TargetConfig.from_json(target.config, target.name)
    if asked.draft is None:
        return Found(target, None, target_config, None)
    draft = checkpoint.find(asked.draft, asked.draft_revision, draft=True, embedded=asked.embedded)
    draft_config = DraftConfig.from_json(draft.config, draft.name)
    check_pair(target_config, draft_config, target.config, draft.config)
    return Found(target, draft, target_config, draft_config)


def needed(found: Found, draft_bits: int | None) -> fit.Need:
    """Sum the memory a pair needs."""
    config, draft = found.draft_config, 0
    if found.draft is not None and config is not None:
        bits = None if config.quantization or draft_bits == AS_STORED else draft_bits
        draft = fit.quantized(found.draft.weight_bytes, bits)
    read = Reader(found.target.name, found.target.config.get("text_config"), found.target.config)
    return fit.need(found.target.weight_bytes, draft, read, config)


def fetch(name: str, found: Found, progress: hub.Progress | None = None) -> Found:
    """Download what is missing, if the disk has room, and see that every file is whole."""
    download = sum(part.missing_bytes for part in found.parts)
    if download:
        fit.require_disk(name, download, hub.cache_folder())
    target = found.target.fetch(progress)
    return replace(found, target=target, draft=found.draft and found.draft.fetch(progress))


def check_pair(target: TargetConfig, draft: DraftConfig, target_json: Json, draft_json: Json) -> None:
    """Raise PairError that names both models and everything in which they differ."""
    stated = (draft_json.get("dflash_config") or {}).get("num_target_layers") or draft_json.get("num_target_layers")
    wrong = []
    if draft.hidden_size != target.hidden_size:
        wrong.append(f"hidden size {draft.hidden_size} against {target.hidden_size}")
    if stated is not None and stated != target.num_layers:
        wrong.append(f"made for {stated} layers against {target.num_layers}")
    if max(draft.taps) >= target.num_layers:
        wrong.append(f"taps up to layer {max(draft.taps)} against layers 0 to {target.num_layers - 1}")
    if draft.vocab_size != target.vocab_size:
        wrong.append(f"vocabulary {draft.vocab_size} against {target.vocab_size}")
    if draft.mask_token_id in target.eos_ids:
        wrong.append(f"mask token {draft.mask_token_id}, which the target stops at")
    theirs, ours = _ids(draft_json, "eos_token_id"), _ids(target_json, "bos_token_id", "eos_token_id", "pad_token_id")
    if theirs and ours and not theirs & ours:
        wrong.append(f"end token {_listed(theirs)} against special tokens {_listed(ours)}")
    if wrong:
        raise PairError(f"{draft.name} is no draft for {target.name}: " + "; ".join(wrong))


def _ids(config: Json, *keys: str) -> set[int]:
    places = (config, config.get("text_config") or {})
    return {token for place in places for key in keys for token in ids_of("config.json", key, place.get(key))}


def _listed(ids: set[int]) -> str:
    return ", ".join(str(token) for token in sorted(ids))
