"""Metal text to a shared library: a few rewrites, then clang from the ziglang wheel."""

import os
import pickle
import re
import struct
import subprocess
import sys
from enum import Enum
from functools import cache
from hashlib import sha256
from pathlib import Path

HERE = Path(__file__).parent
STORE = HERE.parents[1] / "build" / "emulator"
COMMON = [
    "-std=c++17",
    "-fPIC",
    "-fno-exceptions",
    "-fno-rtti",
    "-ffp-contract=off",
    "-fno-vectorize",
    "-fno-slp-vectorize",
]
QUIET = ["-Wno-unknown-attributes", "-Wno-unknown-pragmas", "-Wno-pass-failed", "-Werror=uninitialized"]
PARAMETER = re.compile(r"(?P<type>.*?)\s*(?P<name>\w+) \[\[(?P<what>\w+)(?:\((?P<slot>\d+)\))?\]\]")
SHARED = re.compile(r"^(\s*)threadgroup\s+(\w+)\s+(\w+)((?:\s*\[[^\[\];]+\])+)\s*;", re.M)


class Mode(Enum):
    """How a kernel is compiled: bare (fast), checked (every access is seen), counted (every basic block is)."""

    BARE = ("-O2",)
    CHECKED = (
        "-O1",
        "-fsanitize=thread",
        "-fsanitize=array-bounds,shift,integer-divide-by-zero",
        "-ftrivial-auto-var-init=pattern",
    )
    COUNTED = ("-O2", "-fsanitize-coverage=trace-pc-guard,no-prune")


@cache
def toolchain() -> str | None:
    """Why kernels cannot be emulated here, or None if they can."""
    try:
        import ziglang  # noqa: F401
    except ImportError:
        return "the ziglang wheel (clang) is not installed"
    if os.uname().machine not in ("x86_64", "aarch64", "arm64"):
        return f"no fiber switch for {os.uname().machine}"
    return None if sys.platform == "linux" else _probe()


PROBE = """[[kernel]] void probe(
  device float* y [[buffer(0)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]]) {
y[thread_position_in_grid.x] = simd_sum(1.0f);
}
"""


def _probe() -> str | None:
    """Build and run a kernel of one line: only Linux is known to manage, a Mac has the GPU's own parity tests."""
    try:
        job = (str(library(PROBE, Mode.CHECKED)), [], [256], 1, 64, 0, False, True)
    except ValueError as error:
        return f"the emulator does not build here: {str(error).splitlines()[-1]}"
    worker = [sys.executable, str(HERE / "worker.py")]
    done = subprocess.run(worker, input=pickle.dumps(job), capture_output=True)
    if done.returncode:
        return f"the emulator does not run here: exit code {done.returncode}"
    right = struct.pack("64f", *[32.0] * 64)
    return None if pickle.loads(done.stdout)["outputs"] == [right] else "the emulator's sums are wrong here"


def translate(text: str) -> str:
    """C++ for the recorded Metal text, with an `emu_entry` that unpacks buffers and thread positions."""
    text = re.sub(r"^#include <metal_.*$", "", text, flags=re.M)
    head, signature, rest = re.split(r"(?=^\[\[kernel\]\] void )|(?<=\) \{)\n", text, maxsplit=2, flags=re.M)
    body, _, instance = rest.partition("\ntemplate [[host_name")  # absent without template arguments
    name = re.match(r"\[\[kernel\]\] void (\w+)", signature)
    assert name, "no kernel in the text"
    arguments = re.search(r"decltype\(\w+<(.*?)>\)", instance)
    plain, passed = [], []
    for one in signature[signature.index("(") + 1 : signature.rindex(")")].split(",\n"):
        match = PARAMETER.fullmatch(one.strip())
        assert match, f"cannot read parameter {one!r}"
        plain.append(f"{match['type']} {match['name']}")
        pointer = match["type"].replace("device", "").replace("constant", "")
        passed.append(f"({pointer})buffers[{match['slot']}]" if match["what"] == "buffer" else f"ids->{match['what']}")
    body = SHARED.sub(r"\1auto& \3 = *(\2 (*)\4)emu_threadgroup(sizeof(\2\4));", body)
    if left := re.search(r"^[^/\n]*\bthreadgroup\s+\w+\s+\w.*$", body, re.M):
        raise ValueError(f"cannot read this threadgroup declaration: {left[0].strip()}")
    return (
        f'#include "metal.h"\n{head}'
        f"__attribute__((always_inline)) inline void {name[1]}({', '.join(plain)}) {{\n{body}\n"
        f'extern "C" void emu_entry(void** buffers, const Ids* ids) {{\n'
        f"  {name[1]}{f'<{arguments[1]}>' if arguments else ''}({', '.join(passed)});\n}}\n"
    )


def library(text: str, mode: Mode) -> Path:
    """The compiled kernel with its runtime; the counted one has its optimised IR beside it (`.ll`)."""
    source = translate(text)
    runtime = _runtime()
    key = sha256((source + repr(mode.value) + repr(COMMON) + runtime.name + (HERE / "metal.h").read_text()).encode())
    place = STORE / f"{key.hexdigest()[:20]}.so"
    if place.exists():
        return place
    cpp = place.with_suffix(f".{os.getpid()}.cpp")
    cpp.write_text(source, encoding="utf-8")
    flags = [*COMMON, *QUIET, *mode.value, f"-I{HERE}"]
    if mode is Mode.COUNTED:
        _zig("c++", *flags, "-S", "-emit-llvm", str(cpp), "-o", str(place.with_suffix(".ll")))
    _zig("c++", *flags, "-c", str(cpp), "-o", str(cpp.with_suffix(".o")))
    draft = cpp.with_suffix(".so")
    # The linker alone: the C library is in the process already, and zig's driver would build libraries first.
    link = ["ld.lld"] if sys.platform == "linux" else ["cc"]
    _zig(*link, "-shared", str(cpp.with_suffix(".o")), str(runtime), "-o", str(draft))
    cpp.with_suffix(".o").unlink()
    cpp.replace(place.with_suffix(".cpp"))
    draft.replace(place)
    return place


@cache
def _runtime() -> Path:
    STORE.mkdir(parents=True, exist_ok=True)
    source = HERE / "runtime.cpp"
    place = STORE / f"runtime-{sha256(source.read_bytes()).hexdigest()[:16]}.o"
    if not place.exists():
        draft = place.with_suffix(f".{os.getpid()}.o")
        _zig("c++", "-std=c++17", "-O2", "-fPIC", "-fno-exceptions", "-fno-rtti", "-c", str(source), "-o", str(draft))
        draft.replace(place)
    return place


def _zig(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "ziglang", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"the kernel does not compile:\n{done.stderr}")
