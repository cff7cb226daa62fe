"""Loads a compiled kernel and runs it once; as a script, on a pickled job from standard input."""

import ctypes
import pickle
import sys
from functools import cache
from typing import Any


def execute(
    path: str,
    inputs: list[bytes],
    sizes: list[int],
    groups: int,
    threads: int,
    order: int,
    count: bool,
    checked: bool,
) -> dict[str, Any]:
    """Run the kernel over input bytes; `sizes` are the outputs' in bytes."""
    kernel = _load(path)
    for slot, data in enumerate(inputs):
        ctypes.memmove(kernel.emu_bind(slot, len(data), 1), data, len(data))
    places = [kernel.emu_bind(len(inputs) + i, size, 2) for i, size in enumerate(sizes)]
    kernel.emu_run(0, groups, threads, order, int(count))
    faults = kernel.emu_errors().decode().splitlines()
    totals = (ctypes.c_uint64 * 3)()
    kernel.emu_totals(totals)
    blocks = (ctypes.c_uint64 * 4096)()
    used = kernel.emu_blocks(blocks, 4096)
    if checked and not faults:
        missing = [(i, kernel.emu_unwritten(len(inputs) + i)) for i in range(len(sizes))]
        faults += [f"unwritten: {count} bytes of output {i}" for i, count in missing if count]
    return {
        "outputs": [ctypes.string_at(place, size) for place, size in zip(places, sizes, strict=True)],
        "faults": faults,
        "bytes": [_counts(kernel, slot) for slot in range(len(inputs) + len(sizes))],
        "totals": tuple(totals),
        "blocks": list(blocks[:used]),
    }


def _counts(kernel: Any, slot: int) -> dict[str, int]:
    four = (ctypes.c_uint64 * 4)()
    kernel.emu_counts(slot, four)
    return dict(zip(("requested", "per_simdgroup", "per_threadgroup", "once"), map(int, four), strict=True))


@cache
def _load(path: str) -> Any:
    kernel = ctypes.CDLL(path)
    kernel.emu_bind.restype = ctypes.c_void_p
    kernel.emu_bind.argtypes = [ctypes.c_uint32, ctypes.c_size_t, ctypes.c_int]
    kernel.emu_errors.restype = ctypes.c_char_p
    kernel.emu_unwritten.restype = ctypes.c_uint64
    return kernel


if __name__ == "__main__":
    sys.stdout.buffer.write(pickle.dumps(execute(*pickle.loads(sys.stdin.buffer.read()))))
