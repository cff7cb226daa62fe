"""Recorded truth: drafts against a cache-free walk, whole runs against the target's own greedy decoding."""

import json

import mlx.core as mx
import pytest
from pairs import DATA, draft_of, ids_of, prompt_of, run, runs_of, target_of

from dflash_mlx.drafter import Drafter
from dflash_mlx.models.draft import top_ids
from dflash_mlx.sampling import Sampler
from dflash_mlx.types import Options, Sampling

FP32 = ("t-hybrid-fp32", "t-dense-fp32")
HIDDEN, LOGITS = 2e-5, 5e-5  # absolute, float32 on a CPU
TIE = 0.125  # log-probability margin under which 16-bit rounding may choose either token


def unit(target: str) -> tuple[dict, dict]:
    folder = DATA / "goldens"
    return mx.load(str(folder / f"unit-{target}.safetensors")), json.loads((folder / f"unit-{target}.json").read_text())


def unit_cases() -> list[tuple[str, str]]:
    return [(target, draft) for target in FP32 for draft in unit(target)[1] if not draft.endswith("bf16")]


@pytest.mark.parametrize("name", FP32)
def test_every_layers_output_is_the_recorded_one(name):
    arrays, _ = unit(name)
    target = target_of(name)
    wanted = arrays["features"]
    made = target.forward(arrays["tokens"][None], target.new_state(), range(target.config.num_layers)).features
    assert mx.abs(made.reshape(wanted.shape) - wanted).max().item() <= HIDDEN


@pytest.mark.parametrize("target_name, name", unit_cases())
def test_drafts_equal_the_cache_free_walk(target_name, name):
    arrays, meta = unit(target_name)
    target, net = target_of(target_name), draft_of(name)
    drafter, context = Drafter(net, target), net.new_context()
    for i, cycle in enumerate(meta[name]):
        wanted = {key: arrays[f"{name}/c{i}/want_{key}"] for key in ("hidden", "logits", "path")}
        low, high = cycle["ctx_new"]
        features = mx.concatenate([arrays["features"][None, low:high, tap] for tap in net.config.taps], axis=-1)
        drafter.absorb(features, context, last=high)
        width = cycle["block"] - 1
        logits, hidden = drafter._pass(cycle["anchor"], width, context, None)
        assert mx.abs(hidden[0] - wanted["hidden"]).max().item() <= HIDDEN, i
        assert mx.abs(logits - wanted["logits"]).max().item() <= LOGITS, i
        greedy = Sampler(Sampling())
        assert drafter.propose(cycle["anchor"], width, context, greedy).tokens.tolist() == wanted["path"].tolist(), i
        if net.config.version == 2:
            ids = mx.sort(top_ids(logits, net.config.selector_top_k), axis=-1)
            assert ids.tolist() == arrays[f"{name}/c{i}/candidates"].tolist(), i


@pytest.mark.parametrize("target_name, name", unit_cases())
def test_selector_gives_the_recorded_distribution(target_name, name):
    """The walk along the recorded sampled path has, row by row, the recorded 16-way distribution at temperature 0.8."""
    arrays, meta = unit(target_name)
    target, net = target_of(target_name), draft_of(name)
    if net.config.version == 1:
        assert f"{name}/c0/sampled_q" not in arrays, "a DFlash 1 draft has no selector to compare"
        return
    drafter, context = Drafter(net, target), net.new_context()
    for i, cycle in enumerate(meta[name]):
        low, high = cycle["ctx_new"]
        features = mx.concatenate([arrays["features"][None, low:high, tap] for tap in net.config.taps], axis=-1)
        drafter.absorb(features, context, last=high)
        logits, hidden = drafter._pass(cycle["anchor"], cycle["block"] - 1, context, None)
        path = arrays[f"{name}/c{i}/sampled_path_t0.8_seed4242"]
        candidates = arrays[f"{name}/c{i}/sampled_candidates"].astype(mx.int32)
        pairs = net.candidate_selector(hidden, mx.array([cycle["anchor"]]), candidates)
        before = mx.argmax(candidates[:-1] == path[:-1, None], axis=-1).tolist()
        unary = mx.take_along_axis(logits, candidates, axis=-1)
        for row, at in enumerate([0, *before]):
            q = mx.softmax((pairs[row, at] + unary[row]) / 0.8)
            assert mx.abs(q - arrays[f"{name}/c{i}/sampled_q"][row]).max().item() <= LOGITS, (i, row)


def run_cases() -> list[tuple[str, str]]:
    return [(target, draft) for target in FP32 for draft in dict.fromkeys(r["draft"] for r in runs_of(target)["runs"])]


@pytest.mark.parametrize("target_name, name", run_cases())
def test_runs_give_the_recorded_tokens_and_cycles(target_name, name):
    target, net = target_of(target_name), draft_of(name)
    cases = [case for case in runs_of(target_name)["runs"] if case["draft"] == name]
    assert len(cases) > 20
    for case in cases:
        options = Options(max_tokens=case["max_tokens"], prefill_chunk=case["prefill_step_size"])
        prompt, want = prompt_of(target_name, case["prompt"]), case["want"]
        cycles = run(target, net, prompt, options, case["eos"], case["block_size"])
        label = {key: case[key] for key in ("prompt", "block_size", "max_tokens", "eos", "prefill_step_size")}
        assert ids_of(cycles) == case["target_only"], label
        assert [len(cycle.tokens) for cycle in cycles[1:]] == want["emitted"], label
        assert [list(cycle.drafted) for cycle in cycles[1:]] == want["proposals"], label
        assert (cycles[-1].finish if cycles else "length") == want["finish"], label
        if "accepted" in want:
            assert [cycle.accepted for cycle in cycles[1:]] == want["accepted"], label


@pytest.mark.parametrize("name", ["t-hybrid-4bit", "t-dense-4bit"])
def test_four_bit_runs_differ_at_ties_only(name):
    """In 16-bit arithmetic one row and many rows may round apart: a first difference must stand at a small margin."""
    compared = 0
    for case in runs_of(name)["runs"]:
        options = Options(max_tokens=case["max_tokens"], prefill_chunk=case["prefill_step_size"])
        prompt = prompt_of(name, case["prompt"])
        made = ids_of(run(target_of(name), draft_of(case["draft"]), prompt, options, case["eos"], case["block_size"]))
        wanted, margin = case["target_only"], runs_of(name)["greedy"][case["prompt"]]["margin"]
        differing = [i for i, (a, b) in enumerate(zip(made, wanted, strict=False)) if a != b]
        compared += differing[0] if differing else len(wanted)
        if not differing:
            assert len(made) == len(wanted)
        else:
            assert margin[differing[0]] <= TIE, (case["prompt"], case["draft"], case["block_size"], differing[0])
    assert compared > 1000
