"""Prompt lookup: what it proposes, when it is believed, and that blending keeps each proposal's stated distribution."""

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_mlx.acceptance import Draft
from dflash_mlx.ngram import LEAST, MOST, SIZE, VOTES, Lookup, blend


def lookup(*tokens: int) -> Lookup:
    made = Lookup()
    made.extend(tokens)
    return made


def test_new_text_has_no_past():
    assert lookup().propose(4) is None
    assert lookup(*range(50)).propose(4) is None


def test_it_proposes_what_followed_the_latest_time():
    text = [*range(10), 90, 91, *range(10), 80, 81, *range(10)]
    assert lookup(*text).propose(3).tokens == [80, 81, 0]


def test_a_past_that_runs_into_the_end_repeats():
    assert lookup(1, 2, 1, 2, 1, 2, 1).propose(5).tokens == [2, 1, 2, 1, 2]


@given(st.lists(st.integers(0, 3), min_size=SIZE, max_size=60), st.integers(1, 9))
@settings(deadline=None, derandomize=True)
def test_it_agrees_with_a_search_of_the_whole_text(text, width):
    found = lookup(*text).propose(width)
    ends = [at for at in range(SIZE, len(text)) if text[at - SIZE : at] == text[-SIZE:]]
    assert (found is None) == (not ends)
    if ends:
        period = len(text) - ends[-1]
        assert found.tokens == [text[ends[-1] + i % period] for i in range(width)]


def test_a_long_agreement_is_believed_and_a_short_one_asks_the_draft():
    long, short = range(100, 100 + LEAST), range(100, 100 + LEAST - 1)
    assert lookup(*long, 7, 8, 9, *long).propose(2).sure
    assert not lookup(0, *short, 7, 8, 9, *short).propose(2).sure


def test_bad_guesses_raise_what_is_needed_and_good_ones_lower_it():
    made = lookup()
    for _ in range(10):
        made.learn(4, 1)
    assert made.needed == MOST
    made.learn(4, 3)
    assert made.needed == MOST
    for _ in range(100):
        made.learn(4, 4)
    assert made.needed == LEAST


@pytest.mark.parametrize("vote, tokens", [(5, [5, 6, 7]), (4, [5, 60, 70])])
def test_a_draft_that_agrees_hands_over(vote, tokens):
    assert VOTES == 1
    draft = Draft(mx.array([5, 60, 70]), mx.array([[5, 1], [2, 60], [70, 3]]), mx.array([[0.9, 0.1]] * 3))
    made = blend(draft, mx.array([vote, 6, 7]))
    assert made.tokens.tolist() == tokens
    handed = [False, vote == 5, vote == 5]
    stated = mx.where(made.candidates == made.tokens[:, None], made.probabilities, 0).sum(axis=-1)
    own = [0.9, 0.1, 0.9]
    assert stated.tolist() == pytest.approx([1.0 if row else q for row, q in zip(handed, own, strict=True)])
    assert made.probabilities.sum(axis=-1).tolist() == pytest.approx([1.0] * 3)


def test_a_certain_draft_stays_certain():
    made = blend(Draft(mx.array([5, 60])), mx.array([5, 6]))
    assert made.tokens.tolist() == [5, 6] and made.probabilities is None
