"""doctor: what a bug report needs, as one block to paste."""

from dflash_mlx.cli.render import Screen, size


def doctor() -> None:
    """Print a block to paste in a report. It has the versions, the machine, and whose dflash-mlx this is."""
    from dflash_mlx.doctor import report

    found = report()
    memory = found.memory
    facts = {
        "dflash-mlx": f"{found.version} in {found.module}",
        "installed as": found.distribution,
        "python": found.python,
        "system": found.system,
        "packages": ", ".join(f"{name} {version}" for name, version in found.packages.items()),
        "device": found.device,
        "memory": f"{size(memory.total)}, of which {size(memory.usable)} can be used ({memory.rule})",
        "cache": f"{found.cache}, {size(found.cache_free_bytes)} free",
        "default": found.default_pair.removeprefix("pair: "),
        "kernels": "; ".join(found.kernels) or "none, MLX's own operations",
    }
    width = max(map(len, facts))
    print("\n".join(f"{name.ljust(width)}  {value}" for name, value in facts.items()))
    for warning in found.warnings:
        Screen.standard().note(warning)
