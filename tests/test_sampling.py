"""Probabilities against mlx-lm's chain, and the distribution of speculative output against exact probabilities."""

import itertools

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import make_sampler
from pairs import draft_of, ids_of, prompt_of, run, runs_of, target_of
from scipy.stats import chi2

from dflash_mlx.acceptance import Draft, judge_greedy, judge_sampled
from dflash_mlx.drafter import Drafter
from dflash_mlx.errors import OptionError
from dflash_mlx.sampling import Sampler, draw
from dflash_mlx.types import Options, Sampling

CHAINS = [
    Sampling(0.7, top_p=0.9, top_k=20, min_p=0.05),
    Sampling(1.0),
    Sampling(1.3, top_p=0.8, top_k=20),
    Sampling(0.5, min_p=0.1),
    Sampling(2.0, top_k=5),
    Sampling(1.0, top_p=0.95, top_k=20),
]


def chi_square_p(counts: np.ndarray, p: np.ndarray) -> float:
    """Tail probability of counts under p, cells expecting fewer than 5 pooled; 0 when an impossible cell was hit."""
    if counts[p == 0].sum():
        return 0.0
    expected = p * counts.sum()
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    if len(expected) < 2:
        return 1.0
    return float(chi2.sf(((observed - expected) ** 2 / expected).sum(), len(expected) - 1))


@pytest.mark.parametrize("sampling", CHAINS, ids=str)
def test_probabilities_are_those_of_mlx_lms_chain(sampling):
    """Its sampler's own draws, counted, fit our probabilities; and the kept set is exactly the one it can draw."""
    logits = 3 * mx.random.normal((1, 40), key=mx.random.key(3))
    p = np.array(Sampler(sampling).probabilities(logits)[0])
    mx.random.seed(11)
    sampler = make_sampler(sampling.temperature, sampling.top_p, sampling.min_p, top_k=sampling.top_k)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    drawn = np.array(sampler(mx.broadcast_to(logprobs, (20_000, 40))))
    assert chi_square_p(np.bincount(drawn, minlength=40), p) > 1e-4
    assert set(np.flatnonzero(p > 1e-3)) <= set(drawn.tolist())
    assert p.sum() == pytest.approx(1.0, abs=1e-5)


def test_filters_see_the_untempered_distribution():
    logits = mx.log(mx.array([[0.5, 0.3, 0.15, 0.05]]))
    hot = Sampler(Sampling(10.0, top_p=0.6)).probabilities(logits)[0].tolist()
    assert hot[2] == hot[3] == 0.0 and hot[0] > hot[1] > 0.4


def test_filters_wider_than_the_vocabulary_change_nothing():
    logits = mx.array([[0.0, 1.0, 2.0]])
    wide = Sampler(Sampling(1.0, top_k=100)).probabilities(logits)
    assert wide.tolist() == Sampler(Sampling(1.0)).probabilities(logits).tolist()


def test_probabilities_are_float32_and_survive_tiny_ratios():
    logits = mx.array([[0.0, -21.0]], dtype=mx.bfloat16)
    p = Sampler(Sampling(1.0)).probabilities(logits)
    assert p.dtype == mx.float32 and 0 < p[0, 1].item() < 1e-8
    draft = Draft(mx.array([1]), mx.array([[1]]), mx.array([[1e-3]]))
    kept = [judge_sampled(draft, mx.concatenate([p, p]), mx.random.key(i)).accepted.item() for i in range(200)]
    assert sum(kept) == 0


@pytest.mark.parametrize("case", range(12))
def test_rejection_sampling_keeps_the_targets_distribution(case):
    """Toy vocabulary: the first token after judging is distributed as p, whatever q proposes."""
    key = mx.random.key(case)
    keys = mx.random.split(key, 4)
    width, draws = 12, 4000
    p = mx.softmax(2 * mx.random.normal((2, width), key=keys[0]), axis=-1)
    candidates = mx.random.permutation(mx.arange(width), key=keys[1])[None, :4]
    q = mx.softmax(mx.random.normal((1, 4), key=keys[2]) * (case % 3), axis=-1)
    certain = case % 4 == 3

    def one(key: mx.array) -> mx.array:
        first, second = mx.random.split(key)
        token = candidates[0, 0] if certain else candidates[0, draw(q[0], first)]
        draft = Draft(token[None]) if certain else Draft(token[None], candidates, q)
        verdict = judge_sampled(draft, p, second)
        return mx.where(verdict.accepted > 0, token, verdict.bonus)

    drawn = np.array([one(k).item() for k in mx.random.split(keys[3], draws)])
    assert chi_square_p(np.bincount(drawn, minlength=width), np.array(p[0])) > 1e-4


SETS = [
    ("t-dense-fp32", "n-d1-full", Sampling(0.9, top_p=0.98)),
    ("t-dense-fp32", "n-d2-slide", Sampling(1.3, top_p=0.9, top_k=20)),
    ("t-hybrid-fp32", "h-d2-slide", Sampling(1.5, min_p=0.01)),
]


@pytest.mark.parametrize("target_name, name, sampling", SETS, ids=str)
def test_two_drafted_positions_are_distributed_as_the_target(target_name, name, sampling):
    """Draft and judge many times at one place; count the first token and, after the likeliest first, the second."""
    target, net = target_of(target_name), draft_of(name)
    greedy = runs_of(target_name)["greedy"]["p40"]
    prompt, anchor = greedy["prompt"] + greedy["tokens"][:60], greedy["tokens"][60]
    sampler = Sampler(Sampling(**{**fields(sampling), "seed": 9}))
    features = target.forward(mx.array([prompt]), target.new_state(), net.config.taps, tape=False).features
    drafter, context = Drafter(net, target), net.new_context()
    drafter.absorb(features, context, last=len(prompt))
    firsts, seconds = [], {}
    cache: dict[tuple, mx.array] = {}
    for _ in range(600):
        draft = drafter.propose(anchor, 2, context, sampler)
        path = tuple(draft.tokens.tolist())
        if path not in cache:
            rows = target.unembed(target.forward(mx.array([[*prompt, anchor, *path]]), target.new_state()).hidden)[
                0, len(prompt) :
            ]
            cache[path] = sampler.probabilities(rows)
        verdict = judge_sampled(draft, cache[path], sampler.key())
        tokens = [*path[: verdict.accepted.item()], verdict.bonus.item()]
        firsts.append(tokens[0])
        if len(tokens) > 1:
            seconds.setdefault(tokens[0], []).append(tokens[1])
    width = target.config.vocab_size
    p = np.array(next(iter(cache.values()))[0])
    assert chi_square_p(np.bincount(firsts, minlength=width), p) > 1e-4
    first = max(seconds, key=lambda token: len(seconds[token]))
    assert len(seconds[first]) > 50, "drafts are accepted here, or the second position proves nothing"
    p = np.array(cache[next(path for path in cache if path[0] == first)][1])
    assert chi_square_p(np.bincount(seconds[first], minlength=width), p) > 1e-4


def fields(sampling: Sampling) -> dict:
    return {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k", "min_p")}


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_several_denoise_steps_leave_the_distribution_alone(steps):
    """Whole runs: the second emitted token of many seeds, against the target's exact distribution."""
    target, net, prompt = target_of("t-dense-fp32"), draft_of("n-d2-slide"), prompt_of("t-dense-fp32", "p7")
    sampling = Sampling(1.5, top_k=4)
    p_first = Sampler(sampling).probabilities(
        target.unembed(target.forward(mx.array([prompt]), target.new_state()).hidden)[0, -1:]
    )[0]
    likely = mx.argmax(p_first).item()
    rows = target.unembed(target.forward(mx.array([[*prompt, likely]]), target.new_state()).hidden)[0, -1:]
    p, counts = np.array(Sampler(sampling).probabilities(rows)[0]), np.zeros(target.config.vocab_size)
    for seed in range(250):
        options = Options(max_tokens=2, denoise_steps=steps, sampling=Sampling(1.5, top_k=4, seed=seed))
        first, second = ids_of(run(target, net, prompt, options, (), 4))
        counts[second] += first == likely
    assert counts.sum() > 60
    assert chi_square_p(counts, p) > 1e-4


def test_seed_decides_the_tokens_and_its_absence_varies_them():
    target, net, prompt = target_of("t-dense-fp32"), draft_of("n-d2-slide"), prompt_of("t-dense-fp32", "p7")

    def tokens(seed: int | None) -> tuple:
        return tuple(ids_of(run(target, net, prompt, Options(24, sampling=Sampling(2.0, seed=seed)), (), 5)))

    mx.random.seed(0)
    first = tokens(1)
    mx.random.seed(99)
    assert tokens(1) == first != tokens(2)
    assert len({tokens(None) for _ in range(4)}) > 1
    assert Sampler(Sampling(1.0, seed=7)).seed == 7 and isinstance(Sampler(Sampling(1.0)).seed, int)
    assert Sampler(Sampling()).seed is None


@pytest.mark.parametrize("name", ["n-d1-full", "n-d2-slide"])
def test_top_k_of_one_is_greedy(name):
    target, net, prompt = target_of("t-dense-fp32"), draft_of(name), prompt_of("t-dense-fp32", "p17")
    greedy = ids_of(run(target, net, prompt, Options(30), (), 5))
    assert ids_of(run(target, net, prompt, Options(30, sampling=Sampling(1.5, top_k=1)), (), 5)) == greedy


def test_dflash_1_proposes_its_argmax_at_any_temperature():
    target, net, prompt = target_of("t-dense-fp32"), draft_of("n-d1-full"), prompt_of("t-dense-fp32", "p17")
    features = target.forward(mx.array([prompt]), target.new_state(), net.config.taps).features
    context = net.new_context()
    drafter = Drafter(net, target)
    drafter.absorb(features, context, last=len(prompt))
    hot, cold = (drafter.propose(5, 7, context, Sampler(Sampling(t, seed=1))) for t in (5.0, 0.0))
    assert hot.probabilities is None and hot.tokens.tolist() == cold.tokens.tolist()


def test_dflash_2_reports_the_distribution_its_path_was_drawn_from():
    target, net, prompt = target_of("t-dense-fp32"), draft_of("n-d2-slide"), prompt_of("t-dense-fp32", "p17")
    features = target.forward(mx.array([prompt]), target.new_state(), net.config.taps).features
    context, drafter = net.new_context(), Drafter(net, target)
    drafter.absorb(features, context, last=len(prompt))
    sampler = Sampler(Sampling(1.5, seed=4, top_k=2, top_p=0.5))
    draws = [drafter.propose(5, 1, context, sampler) for _ in range(400)]
    q, ids = np.array(draws[0].probabilities[0]), draws[0].candidates[0].tolist()
    assert len(ids) == net.config.selector_top_k and (q > 0).all(), "proposals are never filtered"
    counts = np.array([sum(d.tokens.item() == i for d in draws) for i in ids])
    assert counts.sum() == 400 and chi_square_p(counts, q) > 1e-4


@pytest.mark.parametrize("matching", range(5))
def test_greedy_judging_counts_the_matching_prefix(matching):
    best = [3, 1, 4, 1, 5]
    drafted = [token if i < matching else 7 for i, token in enumerate(best[:4])]
    verdict = judge_greedy(Draft(mx.array(drafted)), mx.array(best))
    assert (verdict.accepted.item(), verdict.bonus.item()) == (matching, best[matching])


BAD = {
    "temperature": [-0.1, "hot", True, float("nan")],
    "top_p": [-0.1, 1.5],
    "top_k": [-1, 1.5],
    "min_p": [2.0],
    "seed": [-1, 2**64, 1.5],
}


@pytest.mark.parametrize("name, value", [(name, value) for name, values in BAD.items() for value in values])
def test_sampling_refuses_by_name_and_value(name, value):
    with pytest.raises(OptionError, match=f"{name} must be .*{value}"):
        Sampling(**{name: value})


def test_different_options_change_the_result():
    """No option is accepted and ignored: each, alone, gives other tokens than temperature alone does."""
    target, net, prompt = target_of("t-dense-fp32"), draft_of("n-d2-slide"), prompt_of("t-dense-fp32", "p7")
    variants = [{}, {"top_p": 0.3}, {"top_k": 2}, {"min_p": 0.5}]
    made = [
        tuple(ids_of(run(target, net, prompt, Options(40, sampling=Sampling(3.0, seed=3, **variant)), (), 5)))
        for variant in variants
    ]
    assert all(a != b for a, b in itertools.combinations(made, 2))
