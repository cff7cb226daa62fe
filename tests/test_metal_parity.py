"""On an Apple GPU: the kernels as Apple's compiler made them, by the checks that the other machines pass too."""

import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from emulator import launcher, toolchain

from dflash_mlx.metal import backend, gate, launch, linear

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from kernels_cuda import check_delta, check_linear, matrix

apple = pytest.mark.skipif(not mx.metal.is_available(), reason="no Apple GPU here; the emulator runs the same text")


@pytest.fixture
def gpu():
    mx.set_default_device(mx.gpu)
    yield
    mx.set_default_device(mx.cpu)


@apple
@pytest.mark.parametrize("seed", range(16))
def test_random_linears(gpu, seed):
    assert backend() == "metal"
    assert check_linear(np.random.default_rng(seed), tile=not gate.matrix_units_are_unproved()) == []


@apple
@pytest.mark.parametrize("seed", range(8))
def test_random_delta_blocks(gpu, seed):
    assert check_delta(np.random.default_rng(seed)) == []


@apple
def test_the_public_call_runs_the_kernel(gpu, monkeypatch, tmp_path):
    """A flagship shape goes through proof and race, and comes out on or visibly off."""
    monkeypatch.setenv("DFLASH_MLX_CACHE", str(tmp_path))
    w, x = matrix(5120, 5120), mx.random.normal((5, 5120)).astype(mx.bfloat16)
    gate.notify(print)
    y = linear.quantized_linear(x, w.weight, w.scales, w.biases, group_size=64, bits=4)
    assert gate.relative_error(y, w.stock(x)) < 1e-2
    assert any("5120x5120" in line for line in gate.report())


@pytest.mark.emulator
@pytest.mark.skipif(bool(toolchain()), reason=str(toolchain()))
@pytest.mark.parametrize("seed", range(2))
def test_the_same_checks_in_the_emulator(seed):
    with launch.borrow(launcher()):
        assert check_linear(np.random.default_rng(seed)) == []
        assert check_delta(np.random.default_rng(seed)) == []


@pytest.mark.emulator
@pytest.mark.skipif(bool(toolchain()), reason=str(toolchain()))
def test_the_checks_notice_a_wrong_kernel():
    def wrong(body, inputs, template, groups, threads, outputs):
        made = launcher()(body, inputs, template, groups, threads, outputs)
        return [a * 1.01 if a.dtype != mx.uint32 else a + 1 for a in made]

    with launch.borrow(wrong):
        assert len(check_linear(np.random.default_rng(0))) >= 4
        assert check_delta(np.random.default_rng(0)) != []
