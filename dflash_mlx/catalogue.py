"""Which pairs are known, what of them is on this machine, whether they fit; and fetching them ahead of use."""

from dataclasses import dataclass
from pathlib import Path

from dflash_mlx import checkpoint, fit, hub, pairing
from dflash_mlx.errors import DFlashError
from dflash_mlx.models.presets import Preset, package_folder, presets


@dataclass(frozen=True, slots=True)
class Part:
    """One checkpoint on this machine: its folder (None when absent), bytes on disk, and what is wrong with it."""

    name: str
    revision: str | None
    folder: Path | None
    disk_bytes: int
    fault: str | None

    @property
    def whole(self) -> bool:
        """Tell whether every file is there and uncut."""
        return self.folder is not None and self.fault is None


@dataclass(frozen=True, slots=True)
class PresetStatus:
    """A preset as this machine sees it; `need_bytes` of memory and `fits` are None while its sizes are unknown."""

    preset: Preset
    target: Part
    draft: Part
    need_bytes: int | None
    fits: bool | None
    default: bool

    @property
    def ready(self) -> bool:
        """Tell whether it loads without a download."""
        return self.target.whole and self.draft.whole


def catalogue() -> list[PresetStatus]:
    """Return the state of every preset; the network is not touched."""
    usable, default = fit.memory().usable, pairing.default_preset()[0]
    made = []
    for known in presets().values():
        target = _lookup(known, known.model, known.revision, draft=False)
        draft = _lookup(known, str(known.draft), known.draft_revision, draft=True)
        need = _need(known) if target.whole and draft.whole else known.need_bytes
        fits = None if need is None else need <= usable
        made.append(PresetStatus(known, target, draft, need, fits, known is default))
    return made


def _lookup(known: Preset, name: str, revision: str | None, *, draft: bool) -> Part:
    folder = package_folder(name) if known.embedded else hub.cached(name, revision)
    return Part(name, revision, None, 0, None) if folder is None else _part(name, revision, folder, draft)


def _part(name: str, revision: str | None, folder: Path, draft: bool) -> Part:
    size, fault = sum(file.stat().st_size for file in folder.glob("*") if file.is_file()), None
    try:
        checkpoint.require_whole(folder, name, draft)
    except DFlashError as error:
        fault = str(error)
    return Part(name, revision, folder, size, fault)


def _need(known: Preset) -> int:
    return pairing.needed(pairing.find(known), known.draft_bits).total


def pull(
    pair: str | None = None, *, model: str | None = None, draft: str | None = None, revision: str | None = None,
    draft_revision: str | None = None, progress: hub.Progress | None = None,
) -> list[Part]:  # fmt: skip
    """Check a pair from its config.json, download what is missing of it, and return its checkpoints; loads nothing."""
    asked, _ = pairing.request(pair, model, draft, revision, draft_revision)
    found = pairing.fetch(asked.name, pairing.find(asked), progress)
    return [_part(part.name, part.commit, part.folder, part.draft) for part in found.parts]
