"""Whether a kernel may be used: proved once per machine, text and shape, and switched off visibly where it fails."""

import json
import os
import re
import time
import warnings
from collections.abc import Callable, Hashable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx

from dflash_mlx.metal.launch import backend, digest

RACE_BYTES = 256 << 20  # more than any Apple chip's last-level cache
TOLERANCE = 1e-2  # of a float32 reference: bfloat16 outputs alone round by 2e-3, a wrong index gives about 1
Proof = Callable[[], float]
Race = Callable[[], dict[int, tuple[float, float, int]]]  # by rows: seconds ours, seconds stock, the blocking that won

_allowed = [True]
_notice: list[Callable[[str], None]] = [lambda line: warnings.warn(line, RuntimeWarning, stacklevel=2)]
_settled: dict[Hashable, Any] = {}
_agreed: dict[str, float] = {}  # checks made by this process; compiled kernels do not outlive it


def enable(on: bool) -> None:
    """Allow or forbid all kernels in this process."""
    _allowed[0] = on


def settled(key: Hashable, decide: Callable[[], Any]) -> Any:
    """The answer of `decide`, asked once until a kernel is switched off: the way of every call after the first."""
    place = (backend(), enabled(), os.environ.get("DFLASH_MLX_CACHE"), key)
    if place not in _settled:
        _settled[place] = decide()
    return _settled[place]


def enabled() -> bool:
    """Whether kernels are allowed: neither `enable(False)` nor DFLASH_MLX_KERNELS=0 forbids them."""
    return _allowed[0] and os.environ.get("DFLASH_MLX_KERNELS", "1") != "0"


def notify(callback: Callable[[str], None]) -> None:
    """Send the one line that tells of a kernel switched off to `callback` (the default is a RuntimeWarning)."""
    _notice[0] = callback


def wins(kernel: str, shape: str, race: Race) -> bool:
    """Whether the kernel is on for this shape, racing it against the stock one if that has not been done here."""
    if backend() == "borrowed":  # whoever lends the launcher has no use for a race
        return bool(_verdicts().get(f"{kernel} {shape}", {"on": True})["on"])
    verdict = _verdicts().get(f"{kernel} {shape}")
    if verdict is None:
        verdict = _judge(kernel, shape, race)
    return bool(verdict["on"])


def choice(kernel: str, shape: str, rows: int) -> int | None:
    """The blocking that won the race nearest below `rows`, or None where there was none."""
    times = _verdicts().get(f"{kernel} {shape}", {}).get("times", {})
    raced = [m for m in map(int, times) if m <= rows]
    return int(times[str(max(raced))][2]) if raced else None


def agrees(kernel: str, shape: str, proof: Proof, rows: int = 0) -> bool:
    """Whether the kernel's numbers hold for this shape and row count; a failure switches off the whole shape."""
    name = f"{kernel} {shape}"
    if not _verdicts().get(name, {"on": True})["on"]:
        return False
    place = f"{backend()} {name} {rows}"
    if place not in _agreed:
        try:
            _agreed[place] = proof()
        except (RuntimeError, ValueError) as error:
            return switch_off(kernel, shape, f"{error}".splitlines()[0])
        if not _agreed[place] <= TOLERANCE:
            return switch_off(kernel, shape, f"wrong by {_agreed.pop(place):.1e} of the stock result at {rows} rows")
    return True


def matrix_units_are_unproved() -> bool:
    """Whether this is an Apple chip of the M5 generation or later, where matrix kernels of this kind have stalled."""
    found = re.match(r"applegpu_g(\d+)", str(mx.device_info().get("architecture", "")))
    return found is not None and int(found[1]) >= 17


def switch_off(kernel: str, shape: str, reason: str) -> bool:
    """Turn a kernel off for a shape, say so in one line, and remember it; returns False, the new state."""
    _remember(f"{kernel} {shape}", {"on": False, "reason": reason})
    _settled.clear()
    _notice[0](f"kernel {kernel} is off for {shape}: {reason}")
    return False


def report() -> list[str]:
    """One line for each verdict known on this machine, for `doctor`."""
    lines = [f"{backend() or 'none here, plain MLX ops serve'}{'' if enabled() else ' (switched off)'}"]
    for name, verdict in sorted(_verdicts().items()):
        times = ", ".join(
            f"{m} rows {ours * 1e6:.0f} us (stock {stock * 1e6:.0f})"
            for m, (ours, stock, _) in verdict.get("times", {}).items()
        )
        lines.append(f"{name}: {'on' if verdict['on'] else 'off, ' + verdict.get('reason', '')} {times}".rstrip())
    return lines


def relative_error(got: mx.array, want: mx.array) -> float:
    """Norm of the difference over the norm of `want`, in float32."""
    got, want = got.astype(mx.float32), want.astype(mx.float32)
    return float(mx.linalg.norm(got - want) / mx.linalg.norm(want))


def chain_seconds(calls: list[Callable[[mx.array], mx.array]], x: mx.array, turns: int = 3) -> float:
    """Median seconds of one call in a chain where each needs the one before; calls differ in their weights."""
    rounds = max(1, 8 // len(calls))

    def chain() -> float:
        y = x
        for call in calls * rounds:
            y = x + call(y)[..., :1] * 0
        start = time.perf_counter()  # the graph is built: from here on the device works
        mx.eval(y)
        return time.perf_counter() - start

    chain()
    return median(chain() for _ in range(turns)) / (rounds * len(calls))


def _judge(kernel: str, shape: str, race: Race) -> dict[str, Any]:
    name = f"{kernel} {shape}"
    if not _verdicts():
        _notice[0]("timing the kernels on this machine, once: this takes some seconds")
    # A note left by a run that never came back means that this very race hung or crashed the machine.
    _remember(name, {"on": False, "reason": "an earlier trial did not come back"})
    try:
        times = {str(m): result for m, result in race().items()}
    except (RuntimeError, ValueError) as error:
        switch_off(kernel, shape, f"{error}".splitlines()[0])
        return _verdicts()[name]
    lost = [m for m, (ours, stock, _) in times.items() if ours > 1.05 * stock]
    if lost:
        switch_off(kernel, shape, f"slower than the stock kernel at {lost[0]} rows")
        _verdicts()[name]["times"] = times
        return _verdicts()[name]
    _remember(name, {"on": True, "times": times})
    return _verdicts()[name]


def _remember(name: str, verdict: dict[str, Any]) -> None:
    _verdicts()[name] = verdict
    if backend() == "borrowed":
        return
    path = _path(os.environ.get("DFLASH_MLX_CACHE", ""))
    path.parent.mkdir(parents=True, exist_ok=True)
    everything = _stored(path) | {_machine(): _verdicts()}
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(everything, indent=1), encoding="utf-8")
    draft.replace(path)


def _verdicts() -> dict[str, dict[str, Any]]:
    return _loaded(str(backend()), os.environ.get("DFLASH_MLX_CACHE", ""))


@cache
def _loaded(_backend: str, home: str) -> dict[str, dict[str, Any]]:
    verdicts: dict[str, dict[str, Any]] = {} if _backend == "borrowed" else _stored(_path(home)).get(_machine(), {})
    return verdicts


def _stored(path: Path) -> dict[str, Any]:
    try:
        stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stored


def _path(home: str) -> Path:
    return Path(home or Path.home() / ".cache" / "dflash-mlx") / "kernels.json"


@cache
def _machine() -> str:
    info = mx.device_info()
    return f"{info.get('architecture') or info.get('device_name')} mlx {version('mlx')} text {digest()}"
