"""The facts a bug report needs about this machine and this installation."""

import importlib.metadata as metadata
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import dflash_mlx
from dflash_mlx import fit, hub, pairing

_PACKAGES = ("mlx", "mlx-lm", "transformers", "huggingface-hub", "numpy")
_ENTRY = "dflash_mlx.cli.main:main"  # another project's distribution has our name, but not this entry point


@dataclass(frozen=True, slots=True)
class Report:
    """Versions, whose our names are, device, memory and disk in bytes, default pair, kernels, and what looks wrong."""

    version: str
    python: str
    system: str
    packages: dict[str, str]
    module: str
    distribution: str
    device: str
    memory: fit.Memory
    cache: str
    cache_free_bytes: int
    default_pair: str
    kernels: tuple[str, ...]
    warnings: tuple[str, ...]


def report() -> Report:
    """Gather the facts; nothing is loaded and the network is not touched."""
    import mlx.core as mx

    from dflash_mlx import metal

    distribution, warnings = owner()
    device = mx.default_device()
    if device == mx.Device(mx.cpu) and shutil.which("g++") is None:
        warnings = (*warnings, "no g++ on the PATH: MLX runs its fused operations unfused on this CPU")
    return Report(
        version=dflash_mlx.__version__,
        python=f"{platform.python_version()} ({sys.executable})",
        system=platform.platform(),
        packages={name: metadata.version(name) for name in _PACKAGES},
        module=str(Path(dflash_mlx.__file__).parent),
        distribution=distribution,
        device=f"{device.type.name} {mx.device_info().get('device_name', '')}".strip(),
        memory=fit.memory(),
        cache=str(hub.cache_folder()),
        cache_free_bytes=fit.free_bytes(hub.cache_folder()),
        default_pair=pairing.default_preset()[1],
        kernels=tuple(metal.report()) if metal.backend() else (),
        warnings=warnings,
    )


def owner() -> tuple[str, tuple[str, ...]]:
    """Return whose distribution `dflash-mlx` is installed, and a warning for each other claim to our names."""
    try:
        found = metadata.distribution("dflash-mlx")
    except metadata.PackageNotFoundError:
        named, warnings = "not installed; run from a folder", []
    else:
        ours = any(entry.value == _ENTRY for entry in found.entry_points)
        about = found.metadata.json.get("author") or found.metadata.json.get("summary")
        named = f"dflash-mlx {found.version}, " + ("this project" if ours else f"another project ({about})")
        warnings = [] if ours else [f"the installed distribution is {named}; uninstall it, it shares our module's name"]
    others = set(metadata.packages_distributions().get("dflash_mlx", ())) - {"dflash-mlx"}
    warnings += [f"the distribution {name} also installs a module dflash_mlx; uninstall it" for name in sorted(others)]
    return named, tuple(warnings)
