"""models: the pairs known by name, what is on this machine, and what fits."""

from typing import TYPE_CHECKING

from dflash_mlx.cli.render import Screen, size, table

if TYPE_CHECKING:
    from dflash_mlx.models.presets import Preset


def models() -> None:
    """List the pairs known by name. It says what is here already, how large they are, and whether they fit."""
    from dflash_mlx import fit, pairing
    from dflash_mlx.models.presets import presets

    usable = fit.memory().usable
    rows = [("pair", "here", "download", "memory", "fits", "what it is")]
    for preset in presets().values():
        needed = pairing.preset_bytes(preset)
        known = bool(preset.model_bytes and preset.draft_bytes)
        fits = ("yes" if needed <= usable else "no") if known else "yes" if preset.embedded else "unknown"
        memory = size(needed) if known else ""
        rows.append((preset.name, here(preset), download(preset), memory, fits, preset.summary))
    print(table(rows, Screen.standard().width))
    print(f"\n{size(usable)} of memory can be used here ({fit.memory().rule}); a dash means that a size is not known")


def here(preset: "Preset") -> str:
    """Return whether a pair is whole, partly or not at all on this machine; no network is asked."""
    from dflash_mlx import checkpoint, hub
    from dflash_mlx.errors import CheckpointError

    if preset.embedded:
        return "embedded"
    found = 0
    for name, revision, draft in ((preset.model, preset.revision, False), (preset.draft, preset.draft_revision, True)):
        folder = hub.cached(name, revision)
        try:
            if folder is not None:
                checkpoint.require_whole(folder, name, draft)
                found += 1
        except CheckpointError:
            continue
    return ("no", "partly", "yes")[found]


def download(preset: "Preset") -> str:
    """Return the bytes of both checkpoints' weights, as far as they are known."""
    if preset.embedded:
        return ""
    sizes = (preset.model_bytes, preset.draft_bytes)
    return " + ".join(size(count) if count else "-" for count in sizes)
