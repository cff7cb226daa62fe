"""One call runs a kernel in a process of its own and reports outputs, faults and counts."""

import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from dflash_mlx.metal.launch import Body, Launcher, Outputs, Template
from emulator.build import Mode, library
from emulator.count import operations
from emulator.record import metal_text
from emulator.worker import execute


@dataclass
class Report:
    """What one launch did."""

    outputs: list[mx.array]
    faults: list[str]
    bytes: dict[str, dict[str, int]] = field(default_factory=dict)
    operations: dict[str, int] = field(default_factory=dict)
    barriers: int = 0
    meetings: int = 0
    threadgroup_bytes: int = 0


def run(
    body: Body,
    inputs: Sequence[mx.array],
    template: Template,
    groups: int,
    threads: int,
    outputs: Outputs,
    *,
    mode: Mode = Mode.CHECKED,
    order: int = 0,
    edit: Callable[[str], str] = str,
    count: bool = False,
) -> Report:
    """Run a body over the inputs; `order` varies the schedule, `edit` changes the text first (to plant faults)."""
    text = edit(_text(body, tuple(inputs), tuple(template.items()), tuple(outputs)))
    path = library(text, mode)
    arrays = [_bytes(a) for a in inputs]
    sizes = [int(np.prod(shape)) * dtype.size for shape, dtype in outputs]
    job = (str(path), arrays, sizes, groups, threads, order, count, mode is Mode.CHECKED)
    raw = execute(*job) if mode is Mode.BARE else _apart(job)
    names = (*body.inputs, *body.outputs)
    report = Report([_array(raw["outputs"][i], *outputs[i]) for i in range(len(outputs))], raw["faults"])
    report.bytes = {name: raw["bytes"][i] for i, name in enumerate(names)}
    report.barriers, report.meetings, report.threadgroup_bytes = raw["totals"]
    if mode is Mode.COUNTED:
        report.operations = operations(path.with_suffix(".ll").read_text(encoding="utf-8"), raw["blocks"])
    return report


def launcher(mode: Mode = Mode.BARE, seen: list[str] | None = None) -> Launcher:
    """A launcher for `dflash_mlx.metal.launch.borrow`: every kernel runs here; names go to `seen`, faults raise."""

    def launch(
        body: Body, inputs: Sequence[mx.array], template: Template, groups: int, threads: int, outputs: Outputs
    ) -> list[mx.array]:
        report = run(body, inputs, template, groups, threads, outputs, mode=mode)
        if report.faults:
            raise AssertionError("\n".join([body.name, *report.faults]))
        if seen is not None:
            seen.append(body.name)
        return report.outputs

    return launch


def _apart(job: tuple[Any, ...]) -> dict[str, Any]:
    """Run in a process of its own: a faulty kernel may crash, and the runtime keeps state."""
    worker = Path(__file__).with_name("worker.py")
    done = subprocess.run([sys.executable, worker], input=pickle.dumps(job), capture_output=True)
    if done.returncode == 0:
        result: dict[str, Any] = pickle.loads(done.stdout)
        return result
    blank = [b"\xff" * size for size in job[2]]
    fault = f"crashed: exit code {done.returncode} {done.stderr.decode()[-200:]}"
    nothing: dict[str, int] = {}
    return {"outputs": blank, "faults": [fault], "bytes": [nothing] * 64, "totals": (0, 0, 0), "blocks": []}


_texts: dict[Any, str] = {}


def _text(body: Body, inputs: tuple[mx.array, ...], template: tuple[tuple[str, Any], ...], outputs: Any) -> str:
    # Few elements change the address space, so the size belongs to the key where it is small.
    kinds = tuple((str(a.dtype), min(a.size, 8), a.ndim == 0) for a in inputs)
    key = (body, kinds, tuple((n, str(v)) for n, v in template), tuple(str(d) for _, d in outputs))
    if key not in _texts:
        _texts[key] = metal_text(body, inputs, dict(template), outputs)
    return _texts[key]


def _bytes(array: mx.array) -> bytes:
    flat = mx.contiguous(array)
    mx.eval(flat)
    return bytes(memoryview(flat.view(mx.uint8)))


def _array(data: bytes, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    return mx.array(np.frombuffer(data, np.uint8)).view(dtype).reshape(shape)
