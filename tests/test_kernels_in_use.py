"""Whole runs of a 4-bit hybrid pair with every kernel in the emulator, against the same runs on the plain ops."""

import mlx.core as mx
import pairs
import pytest
from emulator import Mode, launcher, toolchain
from mlx_lm.utils import load_model

from dflash_mlx.metal import gate
from dflash_mlx.metal.launch import borrow
from dflash_mlx.models import TargetConfig, build_target
from dflash_mlx.rollback import DeltaLayer
from dflash_mlx.types import Options

pytestmark = [pytest.mark.emulator, pytest.mark.skipif(bool(toolchain()), reason=str(toolchain()))]
NAME, TOKENS = "t-hybrid-4bit", 10
KERNELS = {"prepare", "verify_qmv", "gated_delta_verify", "head_argmax", "argmax_finish"}


def target(dtype):
    """The 4-bit target with other arithmetic: float32 leaves no near ties between two right answers."""
    model = load_model(pairs.CHECKPOINTS / NAME)[0]
    model.set_dtype(dtype)
    return build_target(model, TargetConfig.from_json(pairs.config_of(NAME), NAME))


@pytest.fixture(autouse=True)
def unproved(monkeypatch):
    """Each kernel proves itself anew."""
    monkeypatch.setattr(gate, "_agreed", {})
    monkeypatch.setattr(gate, "_settled", {})


@pytest.mark.parametrize("block", [1, 2, 3, 5, 8])
def test_a_greedy_run_is_the_twins_run_cycle_by_cycle(block):
    model, net = target(mx.float32), pairs.draft_of("h-d2-slide")
    prompt = pairs.prompt_of("t-hybrid-fp32", "p17")
    options = Options(max_tokens=TOKENS)

    def cycles():
        return [
            (c.tokens, c.accepted) for c in pairs.run(model, net if block > 1 else None, prompt, options, block=block)
        ]

    want, seen = cycles(), []
    with borrow(launcher(Mode.BARE, seen)):
        got = cycles()
    assert got == want
    assert {"prepare", "verify_qmv"} <= set(seen)
    if block > 1:
        assert set(seen) >= KERNELS
        assert any(accepted for _, accepted in got)
        assert any(accepted < block - 1 for _, accepted in got[1:]), "no cycle had a rejection"


def test_rows_of_a_block_are_bit_equal_to_single_rows():
    """In bfloat16, through a whole recurrent layer: projections, recurrence and feed-forward round by row."""
    model = target(mx.bfloat16)
    mixer, feed_forward = model.mixers[0], model.feed_forward[0]
    x = mx.random.normal((1, 5, 64), key=mx.random.key(3)).astype(mx.bfloat16)
    with borrow(launcher()):
        memory, single = mixer.memory(), mixer.memory()
        together = feed_forward(mixer(x, memory, True))
        alone = mx.concatenate([feed_forward(mixer(x[:, i : i + 1], single, True)) for i in range(5)], axis=1)
        mx.eval(together, alone)
    assert isinstance(memory, DeltaLayer)
    assert mx.array_equal(together, alone)
