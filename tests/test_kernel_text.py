"""The text that MLX composes for Metal: pinned, and checked by rules that Apple's compiler has and ours has not."""

import os
import re
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import pytest
from emulator import metal_text, toolchain
from emulator.spaces import complaints

from dflash_mlx.metal import linear, recurrent
from dflash_mlx.metal.launch import BODIES, borrow
from dflash_mlx.metal.linear import Quantized

GOLDEN = Path(__file__).parent / "data" / "kernel_text.txt"


def recorded():
    """One recorded text a body, for a call as the flagship makes it but small."""
    texts = {}

    def record(body, inputs, template, groups, threads, outputs):
        texts.setdefault(body.name, metal_text(body, inputs, template, outputs))
        return [mx.zeros(shape, dtype) for shape, dtype in outputs]

    weight = mx.zeros((64, 64), mx.uint32)
    w = Quantized(weight, *[mx.zeros((64, 8), mx.bfloat16)] * 2, 64, 4)
    q, v, g = mx.zeros((1, 5, 2, 128)), mx.zeros((1, 5, 6, 128)), mx.zeros((1, 5, 6))
    rows = recurrent.Rows(q.astype(mx.bfloat16), q.astype(mx.bfloat16), v.astype(mx.bfloat16), g, g.astype(mx.bfloat16))
    with borrow(record):
        linear._rows(w, mx.zeros((5, 512), mx.bfloat16))
        linear._best(w, mx.zeros((5, 512), mx.bfloat16))
        linear._tile(w, mx.zeros((12, 512), mx.bfloat16))
        recurrent.kernel(rows, mx.zeros((1, 6, 128, 128)))
    return texts


@pytest.fixture(scope="module")
def texts():
    return recorded()


def generated(texts):
    """What MLX added around our text."""
    parts = []
    for name, text in sorted(texts.items()):
        body = BODIES[name].source
        assert text.count(body) == 1
        parts.append(f"== {name}\n" + text[text.index("template <") :].replace(body, "<body>"))
    return "\n".join(parts)


def test_every_body_is_launched(texts):
    assert set(texts) == set(BODIES)


@pytest.mark.skipif(version("mlx") != "0.32.4", reason="the pinned text is what MLX 0.32.4 composes")
def test_the_generated_text_is_pinned(texts):
    """DFLASH_MLX_PIN=1 writes it anew."""
    now = generated(texts)
    if os.environ.get("DFLASH_MLX_PIN"):
        GOLDEN.write_text(now, encoding="utf-8")
    assert now == GOLDEN.read_text(encoding="utf-8")


def code(text):
    """Without comments and preprocessor lines."""
    return re.sub(r"//.*|^#.*$", "", text, flags=re.M)


RULES = {
    "a pointer or reference without an address space": r"^(?!.*\b(?:device|constant|thread|threadgroup)\b)"
    r"\s*(?:const )?(?:float|uint|int|auto|\w+_t|uint[234]|float[24])\s*[*&]\s*\w+\s*[=;(]",
    "a double literal": r"(?<![\w.])\d+\.\d*(?:e[+-]?\d+)?(?![\df])",
    "double": r"\bdouble\b",
    "a lambda": r"\[[&=]?\]\s*\(",
    "the standard library": r"\bstd::",
    "goto, new, virtual, throw": r"\b(?:goto|new|delete|virtual|throw|try)\b",
    "half as a variable, which is a type": r"\bhalf\s*[=;]",
    "an unqualified fast-math name": r"\bfast::",
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", BODIES)
def test_the_lint(name, rule):
    assert not re.search(RULES[rule], code(BODIES[name].source), re.M)


PLANTED = {
    "a pointer or reference without an address space": "  float* p = acc;",
    "a double literal": "const float a = 0.5;",
    "double": "double a;",
    "a lambda": "auto f = [&](int i) { return i; };",
    "the standard library": "std::min(a, b);",
    "goto, new, virtual, throw": "goto end;",
    "half as a variable, which is a type": "uint half = 3;",
    "an unqualified fast-math name": "fast::exp(a);",
}


@pytest.mark.parametrize("rule", RULES)
def test_the_lint_bites(rule):
    assert re.search(RULES[rule], PLANTED[rule], re.M)


clang = pytest.mark.skipif(bool(toolchain()), reason=str(toolchain()))


@clang
@pytest.mark.emulator
@pytest.mark.parametrize("name", BODIES)
def test_address_spaces(texts, name):
    assert complaints(texts[name]) == ""


@clang
@pytest.mark.emulator
@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("verify_qmv", "const device float4* rows", "const thread float4* rows"),
        ("verify_qmv", "const device float4* rows", "const constant float4* rows"),
        ("gated_delta_verify", "*((device float4*)committed", "*((threadgroup float4*)committed"),
        ("prepare", "device float* out", "threadgroup float* out"),
        ("prepare", "device float* out", "const device uint* out"),
    ],
)
def test_a_wrong_address_space_is_refused(texts, name, old, new):
    assert old in texts[name]
    assert "error" in complaints(texts[name].replace(old, new))
