"""Will it fit: the bytes a pair needs in memory and on disk, against what this machine has."""

import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_mlx.errors import ResourceError
from dflash_mlx.models.config import DraftConfig, Reader

CONTEXT = 4096  # tokens for which a pair must fit; the answer to a longer prompt needs more, and says so itself
DISK_RESERVE = 1_000_000_000  # bytes that a download leaves free
_BF16 = 2


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes a pair needs at `tokens` of context: weights, recurrent state, and keys and values."""

    target: int
    draft: int
    state: int
    kv: int
    tokens: int = CONTEXT

    @property
    def total(self) -> int:
        """Sum in bytes."""
        return self.target + self.draft + self.state + self.kv

    def __str__(self) -> str:
        parts = f"target {gb(self.target)} + draft {gb(self.draft)} + state {gb(self.state)}"
        return f"{gb(self.total)} ({parts} + keys and values {gb(self.kv)} at {self.tokens} tokens)"


@dataclass(frozen=True, slots=True)
class Memory:
    """This machine's memory in bytes: all of it, what one process may use, and the rule that says so."""

    total: int
    usable: int
    rule: str


def gb(size: int) -> str:
    """Format bytes as decimal gigabytes, as disks and model pages count."""
    return f"{size / 1e9:.1f} GB" if size >= 50_000_000 else f"{size / 1e6:.1f} MB"


def quantized(size: int, bits: int | None) -> int:
    """Return what `size` bytes of bf16 weights become at `bits` with a scale and a bias for each 64 weights."""
    return size if bits is None else int(size * (bits + 0.5) / 16)


def need(target_bytes: int, draft_bytes: int, target: Reader, draft: DraftConfig | None) -> Need:
    """Sum a pair's memory from its weights in bytes and its configs; raise CheckpointError for a config with gaps."""
    heads, layers = target.positive("num_attention_heads"), target.positive("num_hidden_layers")
    width = target.positive("head_dim", target.positive("hidden_size") // heads)
    full = layers // target.positive("full_attention_interval", 4) if _recurrent_state(target) else layers
    kv = full * CONTEXT * 2 * target.positive("num_key_value_heads", heads) * width * _BF16
    if draft is not None:
        rows = sum(min(CONTEXT, window or CONTEXT) for window in draft.windows)
        kv += rows * 2 * draft.num_kv_heads * draft.head_dim * _BF16
    return Need(target_bytes, draft_bytes, (layers - full) * _recurrent_state(target), kv)


def _recurrent_state(target: Reader) -> int:
    """Bytes of one gated-delta layer: the float32 state (Hv, Dv, Dk) and the last rows of the bf16 convolution."""
    if not target.get("linear_num_value_heads", int, 0):
        return 0
    key_dim = target.positive("linear_key_head_dim")
    keys = target.positive("linear_num_key_heads") * key_dim
    values = target.positive("linear_num_value_heads") * target.positive("linear_value_head_dim")
    return (target.positive("linear_conv_kernel_dim") - 1) * (2 * keys + values) * _BF16 + values * key_dim * 4


def memory() -> Memory:
    """Measure the default MLX device's memory: Metal's working set, a CUDA card's free memory, or the system's."""
    import mlx.core as mx

    info: Mapping[str, Any] = mx.device_info()
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if "max_recommended_working_set_size" in info:
        return Memory(total, int(info["max_recommended_working_set_size"]), "Metal's recommended working set")
    if mx.default_device() == mx.Device(mx.gpu) and "total_memory" in info:
        card = int(info["total_memory"])
        return Memory(card, int(info.get("free_memory", card)), "the GPU's free memory")
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return Memory(total, int(lines["MemAvailable"].split()[0]) * 1024, "the memory available now")
    return Memory(total, total * 3 // 4, "three quarters of the memory")


def is_apple_silicon() -> bool:
    """Tell whether this is an Apple machine on which MLX has its GPU."""
    return platform.system() == "Darwin" and platform.machine() == "arm64"


def require_memory(name: str, needed: Need, have: Memory) -> None:
    """Raise ResourceError with all the sums when the pair does not fit."""
    if needed.total > have.usable:
        raise ResourceError(
            f"{name} needs {needed} of memory, and this machine gives {gb(have.usable)} "
            f"of {gb(have.total)} (threshold: {have.rule}); close programs, use --draft-bits 4, or a smaller pair"
        )


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the disk on which `folder` lies or would be made."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def require_disk(name: str, download: int, folder: Path) -> None:
    """Raise ResourceError with the sums when `download` bytes do not fit beside the reserve."""
    free = free_bytes(folder)
    if download + DISK_RESERVE > free:
        raise ResourceError(
            f"{name} needs {gb(download)} of disk plus a reserve of {gb(DISK_RESERVE)}, and {folder} has {gb(free)} "
            "free; make room, or set HF_HOME to another disk"
        )
