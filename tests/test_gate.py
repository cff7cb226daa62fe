"""A kernel must earn its place, lose it visibly, and never take the program down with it."""

import json

import mlx.core as mx
import pytest

from dflash_mlx import metal
from dflash_mlx.metal import gate, launch, linear

SHAPE = "64x256 4-bit/64"


@pytest.fixture(autouse=True)
def room(monkeypatch, tmp_path):
    """An empty cache, a pretended GPU, and the lines that were said."""
    monkeypatch.setenv("DFLASH_MLX_CACHE", str(tmp_path))
    monkeypatch.setattr(gate, "backend", lambda: "metal")
    monkeypatch.setattr(gate, "_machine", lambda: "a chip")
    monkeypatch.setattr(gate, "_agreed", {})
    monkeypatch.setattr(gate, "_settled", {})
    monkeypatch.setattr(gate, "_notice", [print])
    gate._loaded.cache_clear()
    yield tmp_path / "kernels.json"
    gate._loaded.cache_clear()


def forbidden():
    raise AssertionError("not to be called")


def test_a_winner_is_raced_once_and_remembered(room):
    assert gate.wins("k", SHAPE, lambda: {1: (1e-5, 2e-5, 8), 5: (1e-5, 4e-5, 4)})
    gate._loaded.cache_clear()  # as in the next process
    assert gate.wins("k", SHAPE, forbidden)
    assert [gate.choice("k", SHAPE, m) for m in (1, 4, 5, 8)] == [8, 8, 4, 4]
    assert gate.choice("other", SHAPE, 1) is None
    assert json.loads(room.read_text())["a chip"][f"k {SHAPE}"]["on"]
    assert any("on" in line and "5 rows 10 us (stock 40)" in line for line in gate.report())


def test_a_loser_is_switched_off_with_one_line(capsys):
    assert not gate.wins("k", SHAPE, lambda: {1: (1e-5, 2e-5, 8), 5: (5e-5, 4e-5, 4)})
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "timing the kernels on this machine, once: this takes some seconds",
        f"kernel k is off for {SHAPE}: slower than the stock kernel at 5 rows",
    ]
    assert not gate.wins("another", SHAPE, lambda: {1: (2e-5, 1e-5, 8)})
    assert len(capsys.readouterr().out.splitlines()) == 1
    gate._loaded.cache_clear()
    assert not gate.wins("k", SHAPE, forbidden)
    assert any("off, slower" in line for line in gate.report())


def test_a_refused_launch_switches_off(capsys):
    def refused():
        raise RuntimeError("[metal::Device] Unable to build kernel\nlong log")

    assert not gate.wins("k", SHAPE, refused)
    assert capsys.readouterr().out.endswith("Unable to build kernel\n")
    assert gate.wins("other", SHAPE, lambda: {1: (1.0, 2.0, 4)})
    assert not gate.agrees("other", SHAPE, refused, rows=3)
    assert not gate.wins("other", SHAPE, forbidden)


@pytest.mark.parametrize("error", [0.5, float("nan")])
def test_wrong_numbers_switch_off_the_whole_shape(error, capsys):
    assert gate.wins("k", SHAPE, lambda: {1: (1.0, 2.0, 4)})
    assert gate.agrees("k", SHAPE, lambda: 1e-3, rows=1)
    assert not gate.agrees("k", SHAPE, lambda: error, rows=4)
    assert not gate.agrees("k", SHAPE, forbidden, rows=1)
    assert "wrong by" in capsys.readouterr().out


def test_numbers_are_checked_once_a_process():
    assert gate.agrees("k", SHAPE, lambda: 0.0, rows=2)
    assert gate.agrees("k", SHAPE, forbidden, rows=2)


def test_a_trial_that_never_came_back_counts_against_the_kernel(capsys):
    class PowerCut(BaseException):
        pass

    def hang():
        raise PowerCut

    with pytest.raises(PowerCut):
        gate.wins("k", SHAPE, hang)
    gate._loaded.cache_clear()
    assert not gate.wins("k", SHAPE, forbidden)
    assert any("did not come back" in line for line in gate.report())


def test_switching_off_from_outside_is_remembered(capsys):
    metal.switch_off("k", SHAPE, "no token for 30 s")
    gate._loaded.cache_clear()
    assert not gate.wins("k", SHAPE, forbidden)


def test_a_damaged_file_is_an_empty_one(room):
    room.write_text("{")
    assert gate.wins("k", SHAPE, lambda: {1: (1.0, 2.0, 4)})


def test_the_kill_switches(monkeypatch):
    assert gate.enabled()
    metal.enable(False)
    assert not gate.enabled()
    assert "switched off" in gate.report()[0]
    metal.enable(True)
    monkeypatch.setenv("DFLASH_MLX_KERNELS", "0")
    assert not gate.enabled()


def call():
    w, s, b = mx.quantize(mx.random.normal((64, 256), key=mx.random.key(0)), group_size=64, bits=4)
    x = mx.random.normal((5, 256), key=mx.random.key(1))
    stock = mx.quantized_matmul(x, w, s, b, transpose=True, group_size=64, bits=4)
    return stock, lambda: metal.quantized_linear(x, w, s, b, group_size=64, bits=4)


def test_a_launch_that_fails_leaves_the_stock_result(monkeypatch, capsys):
    monkeypatch.setattr(gate, "backend", launch.backend)

    def broken(*_):
        raise RuntimeError("no such luck")

    stock, linear_ = call()
    with launch.borrow(broken):
        assert mx.array_equal(linear_(), stock)
    assert "no such luck" in capsys.readouterr().out


def test_switched_off_nothing_is_launched(monkeypatch):
    stock, linear_ = call()
    monkeypatch.setenv("DFLASH_MLX_KERNELS", "0")
    with launch.borrow(forbidden):
        assert mx.array_equal(linear_(), stock)


def test_the_race_compares_like_with_like(monkeypatch):
    """Both sides run over the same copies, as many as no cache holds, and are checked for every number of rows."""
    monkeypatch.setattr(gate, "RACE_BYTES", 3 * 64 * 32 * 4)
    w = linear.Quantized(*mx.quantize(mx.random.normal((64, 256)), group_size=64, bits=4), 64, 4)
    calls = []

    def ours(matrix, x):
        calls.append((id(matrix), x.shape[0]))
        return matrix.stock(x)

    times = linear._race(w, mx.float32, {2: ours, 8: ours}, (1, 5))
    assert set(times) == {1, 5}
    assert all(a > 0 and b > 0 for a, b, _ in times.values())
    assert times[5][2] == 2  # eight outputs of five rows are too many sums for a lane
    assert len({matrix for matrix, _ in calls}) == 3
    assert {rows for _, rows in calls} == {1, 5}


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="mode must be"):
        metal.quantized_linear(*[mx.zeros((1, 64))] * 4, group_size=64, bits=4, mode="quick")


def test_m5_generations_have_no_matrix_tile_yet(monkeypatch):
    for architecture, unproved in (("applegpu_g17s", True), ("applegpu_g16p", False), ("sm_90", False)):
        monkeypatch.setattr(mx, "device_info", lambda a=architecture: {"architecture": a})
        assert gate.matrix_units_are_unproved() is unproved
