"""models: the pairs known by name, what is on this machine, and what fits."""

from typing import TYPE_CHECKING

from dflash_mlx.cli.render import Screen, size, table

if TYPE_CHECKING:
    from dflash_mlx.catalogue import Part, PresetStatus

HEAD = ("pair", "here", "weights", "memory", "fits", "what it is")


def models() -> None:
    """List the pairs known by name. It says what is here already, how large they are, and whether they fit."""
    from dflash_mlx.catalogue import catalogue

    screen, found = Screen.standard(), catalogue()
    print(table([HEAD, *map(row, found)], screen.width))
    print("\n* the default on this machine; a dash stands for a size that nobody has stated")
    for part in (part for status in found for part in (status.target, status.draft) if part.fault):
        screen.note(part.fault)


def row(status: "PresetStatus") -> tuple[str, ...]:
    """Return a pair's line."""
    known, parts = status.preset, (status.target, status.draft)
    here = "yes" if status.ready else "partly" if any(part.folder for part in parts) else "no"
    weights = [_weights(*one) for one in zip(parts, (known.model_bytes, known.draft_bytes), strict=True)]
    memory = "-" if status.need_bytes is None else size(status.need_bytes)
    fits = "-" if status.fits is None else "yes" if status.fits else "no"
    name = f"{known.name} *" if status.default else known.name
    return (
        name,
        "built in" if known.embedded else here,
        " + ".join(weights) if any(part != "-" for part in weights) else "-",
        memory,
        fits,
        known.summary,
    )


def _weights(part: "Part", stated: int | None) -> str:
    count = part.disk_bytes if part.whole else stated
    return size(count) if count else "-"
