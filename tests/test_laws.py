"""The laws of the engine, over random drafts, block sizes, budgets, stops and chunks."""

import threading

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx.utils import tree_map
from mlx_lm.models import cache, gated_delta, qwen3_5
from pairs import draft_of, ids_of, prompt_of, run, target_of

from dflash_mlx.decode import decode
from dflash_mlx.models import DraftNet, Target
from dflash_mlx.rollback import DeltaLayer, State
from dflash_mlx.sampling import Sampler
from dflash_mlx.types import Options, Sampling

PAIRS = [
    ("t-hybrid-fp32", "h-d2-slide"),
    ("t-hybrid-fp32", "h-d1-sw16"),
    ("t-hybrid-fp32", "h-d2-causal"),
    ("t-dense-fp32", "n-d2-mixed"),
    ("t-dense-fp32", "n-d1-causal"),
]
quick = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def noisy(name: str, noise: float) -> DraftNet:
    """A draft of lesser quality: relative noise on its feature projection, from a perfect draft to a useless one."""
    net = DraftNet(draft_of(name).config)
    net.update(tree_map(lambda a: a, draft_of(name).parameters()))
    weight = net.fc.weight
    net.fc.weight = weight + noise * weight.std() * mx.random.normal(weight.shape, key=mx.random.key(7))
    return net


def plain(target, prompt, budget, stop=()):
    return ids_of(run(target, None, prompt, Options(max_tokens=budget), stop))


prompts = st.lists(st.integers(0, 507), min_size=1, max_size=40)


@quick
@given(
    st.sampled_from(PAIRS), prompts, st.integers(2, 9), st.integers(0, 40), st.integers(1, 50), st.integers(1, 3),
    st.sampled_from([0.0, 0.3, 3.0]), st.sets(st.integers(0, 507), max_size=60),
)  # fmt: skip
def test_greedy_tokens_are_the_targets_own(pair, prompt, block, budget, chunk, steps, noise, stop):
    target, net = target_of(pair[0]), noisy(pair[1], noise)
    options = Options(max_tokens=budget, prefill_chunk=chunk, denoise_steps=steps)
    cycles = run(target, net, prompt, options, stop, block)
    made = ids_of(cycles)
    assert made == plain(target, prompt, budget, stop)
    assert len(made) <= budget and not set(made[:-1]) & stop
    assert not cycles or (cycles[-1].finish == "stop") == (made[-1] in stop)
    assert all(cycle.finish is None and cycle.seconds > 0 and cycle.tokens for cycle in cycles[:-1])


class Watched(Target):
    """A target, remembering the states it hands out."""

    def __init__(self, inner: Target) -> None:
        self.__dict__.update(inner.__dict__)
        self.states: list[State] = []

    def new_state(self) -> State:
        self.states.append(super().new_state())
        return self.states[-1]


def assert_states_agree(left: State, right: State) -> None:
    assert left.length == right.length
    for a, b in zip(left.layers, right.layers, strict=True):
        if isinstance(a, DeltaLayer):
            left_state, right_state = a.settled(a.recurrent), b.settled(b.recurrent)
            assert left_state.dtype == right_state.dtype == mx.float32
            pairs = [(left_state, right_state), (a.conv_state(a.inputs), b.conv_state(b.inputs))]
        else:
            pairs = [(x[:, :, : a.length], y[:, :, : a.length]) for x, y in zip(a.arrays(), b.arrays(), strict=True)]
        for x, y in pairs:
            assert mx.abs(x - y).max().item() <= 1e-5


@quick
@given(prompts, st.integers(2, 9), st.sampled_from([0.0, 3.0]), st.integers(1, 12))
def test_state_after_every_cycle_is_that_of_a_plain_run(prompt, block, noise, stop_after):
    target = Watched(target_of("t-hybrid-fp32"))
    net, emitted = noisy("h-d2-slide", noise), []
    cycles = decode(target, net, prompt, Options(max_tokens=60), set(), Sampler(Sampling()), block)
    for count, cycle in enumerate(cycles):
        emitted += cycle.tokens
        assert target.states[0].length == len(prompt) + len(emitted) - 1
        if count == stop_after:
            break
    reference = target_of("t-hybrid-fp32")
    state = reference.new_state()
    for token in [*prompt, *emitted[:-1]]:
        reference.forward(mx.array([[token]]), state, tape=False)
    assert_states_agree(target.states[0], state)


def test_state_after_512_steps_with_rollbacks_is_that_of_single_steps():
    target = target_of("t-hybrid-fp32")
    rolled, stepped = target.new_state(), target.new_state()
    ids = mx.random.randint(0, 508, (512,), key=mx.random.key(1)).tolist()
    at = 0
    for turn in range(10_000):
        width = min(1 + turn * 5 % 8, len(ids) - at)
        kept = 1 + turn * 3 % width
        junk = [(token + 1) % 508 for token in ids[at + kept : at + width]]
        target.forward(mx.array([ids[at : at + kept] + junk]), rolled)
        at += kept
        rolled.keep(at)
        mx.eval(rolled.arrays())
        if at == len(ids):
            break
    for token in ids:
        target.forward(mx.array([[token]]), stepped, tape=False)
        mx.eval(stepped.arrays())
    assert_states_agree(rolled, stepped)


@quick
@given(prompts, st.integers(2, 8), st.integers(0, 6), st.integers(0, 6))
def test_an_abandoned_stream_leaves_the_pair_as_it_was(prompt, block, first, second):
    target, net = target_of("t-hybrid-fp32"), draft_of("h-d2-slide")
    wanted = plain(target, prompt, 24)
    for stop_after in (first, second):
        cycles = decode(target, net, prompt, Options(max_tokens=24), set(), Sampler(Sampling()), block)
        made = [token for cycle, _ in zip(cycles, range(stop_after), strict=False) for token in cycle.tokens]
        cycles.close()
        assert made == wanted[: len(made)]
    assert ids_of(run(target, net, prompt, Options(max_tokens=24), (), block)) == wanted


@pytest.mark.parametrize("drafts", [("h-d2-slide", "h-d2-slide"), ("h-d2-slide", "h-d2-mixed"), ("h-d1-full", None)])
def test_interleaved_streams_each_give_their_solo_tokens(drafts):
    """Also with drafts that tap other layers of the same target, and with a plain run in between."""
    target = target_of("t-hybrid-fp32")
    wanted = [plain(target, prompt_of("t-hybrid-fp32", name), 30) for name in ("p17", "p40")]
    streams = [
        decode(target, draft and draft_of(draft), prompt_of("t-hybrid-fp32", name), Options(max_tokens=30), set(),
               Sampler(Sampling()), 8 if draft else 1)
        for draft, name in zip(drafts, ("p17", "p40"), strict=True)
    ]  # fmt: skip
    made: list[list[int]] = [[], []]
    open_streams = [0, 1]
    while open_streams:
        for i in list(open_streams):
            cycle = next(streams[i], None)
            if cycle is None:
                open_streams.remove(i)
            else:
                made[i] += cycle.tokens
    assert made == wanted


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_one_stream_read_from_two_threads_in_turn(temperature):
    target, net, prompt = target_of("t-hybrid-fp32"), draft_of("h-d2-slide"), prompt_of("t-hybrid-fp32", "p17")
    options = Options(max_tokens=30, sampling=Sampling(temperature, top_p=0.9, seed=5))
    wanted = ids_of(run(target, net, prompt, options, (), 8))
    cycles = decode(target, net, prompt, options, set(), Sampler(options.sampling), 8)
    made: list[int] = []
    failures: list[Exception] = []

    def read_one() -> None:
        try:
            made.extend(next(cycles).tokens)
        except Exception as error:  # noqa: BLE001 - whatever happened there is raised here
            failures.append(error)

    while not failures:
        thread = threading.Thread(target=read_one)
        thread.start()
        thread.join()
        if not failures and len(made) < len(wanted):
            read_one()
    assert all(isinstance(failure, StopIteration) for failure in failures), failures
    assert made == wanted


def test_nothing_outside_the_package_is_patched():
    target, net = target_of("t-hybrid-fp32"), draft_of("h-d2-slide")
    owners = [qwen3_5.GatedDeltaNet, qwen3_5.DecoderLayer, qwen3_5.Qwen3_5TextModel, cache.KVCache, gated_delta]
    before = [dict(vars(owner)) for owner in owners]
    names = sorted(name for name, _ in target.model.named_modules())
    cycles = decode(target, net, [1, 2, 3], Options(max_tokens=20), set(), Sampler(Sampling()), 8)
    next(cycles)
    assert [dict(vars(owner)) for owner in owners] == before
    cycles.close()
    run(target, net, [1, 2, 3], Options(max_tokens=8), (), 8)
    assert [dict(vars(owner)) for owner in owners] == before
    assert sorted(name for name, _ in target.model.named_modules()) == names


def test_a_useless_draft_is_parked_and_said_so():
    target = target_of("t-hybrid-fp32")
    net = noisy("h-d2-slide", 0.0)
    net.norm.weight = -net.norm.weight  # proposes what it finds least likely
    cycles = run(target, net, [5, 6, 7], Options(max_tokens=80), (), 8)
    notices = [cycle.notice for cycle in cycles if cycle.notice]
    assert len(notices) == 1 and "parked" in notices[0] and "32 cycles" in notices[0]
    assert [bool(cycle.drafted) for cycle in cycles[1:]] == [True] * 32 + [False] * (len(cycles) - 33)
    assert ids_of(cycles) == plain(target, [5, 6, 7], 80)
