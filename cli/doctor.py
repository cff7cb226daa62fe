"""doctor: what a bug report needs, as one block to paste."""

import platform
import shutil
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from importlib.resources import files
from pathlib import Path

from dflash_mlx import __version__
from dflash_mlx.cli.render import size

PACKAGES = ("mlx", "mlx-metal", "mlx-cpu", "mlx-lm", "transformers", "tokenizers", "huggingface-hub", "typer", "numpy")


def doctor() -> None:
    """Print a block to paste in a report. It has the versions, the machine, and whose dflash-mlx this is."""
    facts = dict(_facts())
    width = max(map(len, facts))
    print("\n".join(f"{name.ljust(width)}  {value}" for name, value in facts.items()))


def _facts() -> Iterator[tuple[str, str]]:
    yield "dflash-mlx", f"{__version__} in {Path(str(sys.modules['dflash_mlx'].__file__)).parent}"
    yield "import dflash_mlx", _owners(metadata.packages_distributions().get("dflash_mlx", ()))
    scripts = metadata.entry_points(group="console_scripts", name="dflash-mlx")
    owners = _owners(script.dist.name for script in scripts if script.dist)
    yield "command", f"{shutil.which('dflash-mlx') or 'not on PATH'}, {owners}"
    yield "python", f"{platform.python_version()} ({sys.executable})"
    yield (
        "system",
        " ".join(filter(None, (platform.system(), platform.release(), platform.machine(), platform.mac_ver()[0]))),
    )
    yield "packages", ", ".join(f"{name} {found}" for name in PACKAGES if (found := _version(name)))
    yield from _machine()


def _machine() -> Iterator[tuple[str, str]]:
    import mlx.core as mx

    from dflash_mlx import fit, hub

    have = fit.memory()
    back_end = "Metal" if mx.metal.is_available() else "CUDA" if mx.default_device() == mx.Device(mx.gpu) else "CPU"
    yield "device", f"{mx.device_info().get('device_name', 'unknown')}, MLX on {back_end}"
    yield "memory", f"{size(have.total)}, of which {size(have.usable)} usable ({have.rule})"
    yield "cache", str(hub.cache_folder())
    bodies = sorted(
        entry.name.removesuffix(".metal")
        for entry in files("dflash_mlx.metal").iterdir()
        if entry.name.endswith(".metal")
    )
    yield (
        "kernels",
        f"{', '.join(bodies) or 'none'} ({'in use where they win' if back_end != 'CPU' else 'not used on the CPU'})",
    )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _owners(names: Iterable[str]) -> str:
    """Return which distributions are behind a name; two of them are a conflict that explains odd behaviour."""
    owners = sorted(set(names))
    told = ", ".join(f"{name} {_version(name)} ({metadata.metadata(name)['Summary']})" for name in owners)
    return (f"installed by {told}" if told else "not installed") + ("; CONFLICT, remove one" if len(owners) > 1 else "")
