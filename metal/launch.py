"""Where kernel text becomes an MLX kernel: bodies, the back end they run on, and one launch function."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Any

import mlx.core as mx

Template = dict[str, Any]
Outputs = Sequence[tuple[tuple[int, ...], mx.Dtype]]
Launcher = Callable[["Body", Sequence[mx.array], Template, int, int, Outputs], list[mx.array]]


@dataclass(frozen=True)
class Body:
    """A kernel's text (files put one after another) and the names of its buffers."""

    name: str
    parts: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def source(self) -> str:
        """The function body that is handed to MLX."""
        return "\n".join(_read(part) for part in self.parts)


QMV = ("weight", "scales", "biases", "xs", "xsum")
BODIES = {
    body.name: body
    for body in (
        Body("prepare", ("prepare",), ("x",), ("xs", "xsum")),
        Body("verify_qmv", ("qmv_dot", "qmv_rows"), QMV, ("y",)),
        Body("head_argmax", ("qmv_dot", "qmv_best"), QMV, ("value", "place")),
        Body("prepare_tiles", ("prepare_tiles",), ("x",), ("xt", "xsum")),
        Body("verify_qmm", ("verify_qmm",), ("weight", "scales", "biases", "xt", "xsum"), ("y",)),
        Body("argmax_finish", ("argmax_finish",), ("value", "place"), ("ids",)),
        Body(
            "gated_delta_verify",
            ("gated_delta_verify",),
            ("q", "k", "v", "g", "beta", "state", "tape_k", "tape_g", "tape_delta", "counts"),
            ("y", "committed", "delta"),
        ),
    )
}

_borrowed: list[Launcher] = []
_programs: dict[Hashable, Any] = {}


def backend() -> str | None:
    """What would run a kernel now: "metal", "cuda", "borrowed" (a launcher given to `borrow`) or None."""
    if _borrowed:
        return "borrowed"
    if mx.default_device().type != mx.DeviceType.gpu:
        return None
    if mx.metal.is_available():
        return "metal"
    return "cuda" if mx.is_available(mx.gpu) else None


class borrow:
    """Within this context every launch goes to `launcher` instead of to a GPU."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher

    def __enter__(self) -> None:
        _borrowed.append(self.launcher)

    def __exit__(self, *_: object) -> None:
        _borrowed.remove(self.launcher)


def launch(
    name: str, inputs: Sequence[mx.array], template: Template, *, groups: int, threads: int, outputs: Outputs
) -> list[mx.array]:
    """Run the named body over `groups` threadgroups of `threads` threads; outputs are (shape, dtype) pairs."""
    if _borrowed:
        return _borrowed[-1](BODIES[name], inputs, template, groups, threads, outputs)
    return call(_built(name, backend() == "cuda"), inputs, template, groups, threads, outputs)


def composed(steps: Callable[..., Any]) -> Any:
    """`steps`, a function of arrays that launches, as one whose text is composed once and not on every call."""
    return steps if _borrowed else mx.compile(steps)


def program(key: Hashable, steps: Callable[..., Any]) -> Any:
    """`steps` composed once and kept under `key`."""
    if _borrowed:
        return steps
    place = (backend(), key)
    if place not in _programs:
        _programs[place] = composed(steps)
    return _programs[place]


def call(
    kernel: Any,
    inputs: Sequence[mx.array],
    template: Template,
    groups: int,
    threads: int,
    outputs: Outputs,
    **more: Any,
) -> list[mx.array]:
    """Call an MLX kernel object with everything but its text."""
    result: list[mx.array] = kernel(
        inputs=list(inputs),
        template=list(template.items()),
        grid=(groups * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[shape for shape, _ in outputs],
        output_dtypes=[dtype for _, dtype in outputs],
        **more,
    )
    return result


def digest() -> str:
    """Names the kernel text as a whole: verdicts made with other text do not count."""
    names = sorted({part for body in BODIES.values() for part in body.parts} | {"prelude", "cuda"})
    return sha256("".join(_read(name) for name in names).encode()).hexdigest()[:12]


def metal_kernel(body: Body) -> Any:
    """The body as MLX's Metal kernel (it can be made anywhere, and called where Metal is)."""
    return mx.fast.metal_kernel(
        name=f"dflash_{body.name}",
        input_names=list(body.inputs),
        output_names=list(body.outputs),
        source=body.source,
        header=_read("prelude"),
    )


@cache
def _built(name: str, cuda: bool) -> Any:
    body = BODIES[name]
    if not cuda:
        return metal_kernel(body)
    return mx.fast.cuda_kernel(
        name=f"dflash_{body.name}",
        input_names=list(body.inputs),
        output_names=list(body.outputs),
        source=body.source,
        header=_read("cuda") + _read("prelude"),
    )


@cache
def _read(part: str) -> str:
    return files("dflash_mlx.metal").joinpath(f"{part}.metal").read_text(encoding="utf-8")
