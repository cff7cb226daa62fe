"""The emulator finds what it claims to find: every detector is shown a fault and the same kernel without it."""

from dataclasses import dataclass

import mlx.core as mx
import pytest
from emulator import Mode, run, toolchain
from emulator.build import translate

from dflash_mlx.metal.launch import BODIES, Body

pytestmark = [pytest.mark.emulator, pytest.mark.skipif(bool(toolchain()), reason=str(toolchain()))]


@dataclass(frozen=True)
class Text(Body):
    """A body given as text."""

    @property
    def source(self):
        return self.parts[0]


def tiny(source, edit=str, *, threads=64, groups=2, size=128, mode=Mode.CHECKED, order=0):
    """Run `source` over x [128] float -> y [size] float."""
    body = Text("tiny", (source,), ("x",), ("y",))
    x = mx.arange(128, dtype=mx.float32)
    return run(body, [x], {}, groups, threads, [((size,), mx.float32)], edit=edit, mode=mode, order=order)


HEAD = "const uint i = thread_position_in_grid.x; const uint t = thread_position_in_threadgroup.x;\n"
FAULTS = {
    "out of bounds": (HEAD + "y[i] = x[i];", "x[i]", "x[i + 1]"),
    "misaligned": (
        HEAD + "const device float2* p = (const device float2*)x; y[i] = p[i / 2].x;",
        "(const device float2*)x",
        "(const device float2*)(x + 1 - i / 64)",
    ),
    "store to an input": (HEAD + "y[i] = x[i];", "y[i] = x[i];", "y[i] = x[i]; *(device float*)(x + i) = 1.0f;"),
    "stored twice": (HEAD + "y[i] = x[i];", "y[i]", "y[i / 2 * 2]"),
    "unwritten": (HEAD + "y[i] = x[i];", "y[i] = x[i];", "if (i != 5) y[i] = x[i];"),
    "load of an output": (HEAD + "y[i] = x[i];", "y[i] = x[i];", "y[i] = x[i] + y[i ^ 1];"),
    "uninitialised": (
        HEAD
        + "threadgroup float s[64]; s[t] = x[i]; threadgroup_barrier(mem_flags::mem_threadgroup); y[i] = s[t ^ 1];",
        "s[t] = x[i];",
        "if (t > 0) s[t] = x[i];",
    ),
    "race (load after store)": (
        HEAD
        + "threadgroup float s[64]; s[t] = x[i]; threadgroup_barrier(mem_flags::mem_threadgroup); y[i] = s[t ^ 1];",
        "threadgroup_barrier(mem_flags::mem_threadgroup);",
        "",
    ),
    "race (store after store)": (
        HEAD + "threadgroup float s[64]; s[t] = x[i]; threadgroup_barrier(mem_flags::mem_threadgroup); y[i] = s[t];",
        "s[t] = x[i];",
        "s[t] = x[i]; s[t / 2 * 2] = x[i];",
    ),
    "race (store after load)": (
        HEAD
        + "threadgroup float s[64]; s[t] = x[i]; threadgroup_barrier(mem_flags::mem_threadgroup); float v = s[t ^ 1];\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup); s[t] = v; y[i] = s[t];",
        "threadgroup_barrier(mem_flags::mem_threadgroup); s[t] = v;",
        "s[t] = v;",
    ),
    "divergent barrier": (
        HEAD + "threadgroup_barrier(mem_flags::mem_threadgroup); y[i] = x[i];",
        "threadgroup_barrier",
        "if (t < 32) threadgroup_barrier",
    ),
    "divergent simd operation": (
        HEAD + "y[i] = simd_shuffle_xor(x[i], 1);",
        "y[i] = simd_shuffle_xor(x[i], 1);",
        "if (t % 32 < 31) y[i] = simd_shuffle_xor(x[i], 1); else y[i] = 0.0f;",
    ),
    "shuffle from lane": (HEAD + "y[i] = simd_shuffle_xor(x[i], 1);", "simd_shuffle_xor", "simd_shuffle_down"),
    "array index out of bounds": (
        HEAD + "float v[4]; for (uint j = 0; j < 4; j++) v[j] = x[i]; y[i] = v[t % 4];",
        "t % 4",
        "t % 5",
    ),
    "shift out of range": (HEAD + "y[i] = float(1u << (t % 32));", "t % 32", "t % 33"),
    "division by zero": (HEAD + "y[i] = float(7u / (t + 1));", "t + 1", "t"),
    "more than 32768 bytes": (
        HEAD + "threadgroup float s[8192]; s[t] = x[i]; y[i] = s[t];",
        "s[8192]",
        "s[8193]",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault):
    source, old, new = FAULTS[fault]
    assert tiny(source).faults == []

    def plant(text):
        assert old in text
        return text.replace(old, new)

    found = "\n".join(tiny(source, plant).faults)
    assert fault in found, found


def test_a_local_without_a_value_is_refused():
    with pytest.raises(ValueError, match="uninitialized"):
        tiny(HEAD + "float v; if (t > 40) v = 1.0f; y[i] = v;")
    half_set = HEAD + "float v[2]; v[t % 2] = x[i]; y[i] = v[t / 32];"
    assert mx.any(mx.isnan(tiny(half_set).outputs[0])).item()  # beyond the compiler's sight, locals start as NaN


def test_a_barrier_that_orders_nothing_is_found():
    source, _, _ = FAULTS["race (load after store)"]
    assert "race" in "\n".join(tiny(source.replace("mem_threadgroup", "mem_none")).faults)


def test_a_simdgroup_barrier_orders_its_own_simdgroup_only():
    source = (
        HEAD + "threadgroup float s[64]; s[t] = x[i]; simdgroup_barrier(mem_flags::mem_threadgroup); y[i] = s[t ^ 1];"
    )
    assert tiny(source).faults == []
    assert "race" in "\n".join(tiny(source.replace("t ^ 1", "t ^ 32")).faults)


def test_a_crash_is_a_fault_and_not_the_end():
    assert "crashed" in tiny(HEAD + "y[i] = x[i + (1u << 29)];", mode=Mode.CHECKED).faults[0]


def test_declarations_that_cannot_be_read_are_refused():
    with pytest.raises(ValueError, match="cannot read this threadgroup declaration"):
        tiny(HEAD + "threadgroup float a[4], b[4]; y[i] = x[i];")


def test_what_shuffles_and_sums_return():
    got = tiny(HEAD + "y[i] = simd_sum(x[i]) + simd_shuffle_xor(x[i], 3);").outputs[0]
    x = mx.arange(128, dtype=mx.float32)
    want = mx.repeat(x.reshape(4, 32).sum(axis=1), 32) + x[mx.array([i ^ 3 for i in range(128)])]
    assert mx.array_equal(got, want)


@pytest.mark.parametrize("order", range(1, 6))
def test_schedules_do_not_change_a_sound_kernel(order):
    source, _, _ = FAULTS["race (store after load)"]
    assert tiny(source, order=order).faults == []
    assert mx.array_equal(tiny(source, order=order).outputs[0], tiny(source).outputs[0])


def test_the_probe_of_unknown_systems():
    from emulator import build

    assert build._probe() is None


def test_counts():
    """64 threads of one simdgroup pair load x[0..3]: requested 4 bytes a thread, unique 16."""
    body = Text("tiny", (HEAD + "y[i] = fma(x[t % 4], 2.0f, 1.0f);",), ("x",), ("y",))
    outputs = [((128,), mx.float32)]
    x = mx.zeros((128,))
    got = run(body, [x], {}, 2, 64, outputs, count=True)
    assert got.bytes["x"] == {"requested": 512, "per_simdgroup": 64, "per_threadgroup": 32, "once": 16}
    assert got.bytes["y"] == {"requested": 512, "per_simdgroup": 512, "per_threadgroup": 512, "once": 512}
    counted = run(body, [x], {}, 2, 64, outputs, mode=Mode.COUNTED)
    assert counted.operations["fma"] == counted.operations["load"] == counted.operations["store"] == 128


def test_the_simdgroup_matrix_multiplies():
    source = (
        "const uint lane = thread_index_in_simdgroup;\n"
        "const uint row = ((lane >> 4) << 2) + ((lane >> 1) & 3);\n"
        "const uint col = ((lane >> 3) & 1) * 4 + (lane & 1) * 2;\n"
        "simdgroup_matrix<float, 8, 8> a, b, c(0.0f);\n"
        "a.thread_elements()[0] = x[row * 8 + col]; a.thread_elements()[1] = x[row * 8 + col + 1];\n"
        "b.thread_elements()[0] = x[64 + row * 8 + col]; b.thread_elements()[1] = x[64 + row * 8 + col + 1];\n"
        "simdgroup_multiply_accumulate(c, a, b, c);\n"
        "y[row * 8 + col] = c.thread_elements()[0]; y[row * 8 + col + 1] = c.thread_elements()[1];\n"
    )
    got = tiny(source, threads=32, groups=1, size=64)
    x = mx.arange(128, dtype=mx.float32).reshape(2, 8, 8)
    assert got.faults == []
    assert mx.array_equal(got.outputs[0].reshape(8, 8), x[0] @ x[1])


def test_translation_keeps_the_body():
    """Nothing but threadgroup declarations is rewritten."""
    from emulator import metal_text

    body = BODIES["argmax_finish"]
    value, place = mx.zeros((2, 40)), mx.zeros((2, 40), mx.uint32)
    text = metal_text(body, [value, place], {"GROUPS": 40}, [((2,), mx.uint32)])
    source = translate(text)
    assert body.source in text
    rewritten = ("threadgroup float", "threadgroup uint")
    assert all(line in source for line in body.source.splitlines() if not line.startswith(rewritten))
