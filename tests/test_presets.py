"""The pairs known by name."""

import json

import pytest

from dflash_mlx import pairing
from dflash_mlx.errors import OptionError
from dflash_mlx.fit import Memory
from dflash_mlx.loading import load
from dflash_mlx.models.presets import package_folder, preset, presets
from dflash_mlx.types import Sampling


def test_the_flagship_is_pinned_with_its_published_sizes_and_defaults():
    flagship = preset("flagship")
    assert (flagship.model, flagship.draft) == ("mlx-community/Qwen3.8-27B-4bit", "z-lab/Qwen3.8-27B-DFlash2")
    assert flagship.revision == "3e6447f082e89cc7f0bc6e5441afd38dfce760ff"
    assert flagship.draft_revision == "50307d4c4cde6860d4eee73e2547cd786fe8e8a4"
    assert (flagship.model_bytes, flagship.draft_bytes, flagship.draft_bits) == (16_054_541_349, 3_848_817_896, 4)
    assert flagship.sampling == Sampling(temperature=1.0, top_p=0.95, top_k=20)
    assert flagship.sampling_plain == Sampling(temperature=0.7, top_p=0.8, top_k=20)


@pytest.mark.parametrize("known", presets().values(), ids=presets())
def test_every_preset_names_two_checkpoints_and_pins_whole_commits_or_none(known):
    assert known.summary and known.model != known.draft
    assert known.embedded or all(part.count("/") == 1 for part in (known.model, known.draft))
    for revision in (known.revision, known.draft_revision):
        assert revision is None or (len(revision) == 40 and set(revision) <= set("0123456789abcdef"))


EMBEDDED = [known for known in presets().values() if known.embedded and package_folder(known.model).is_dir()]


@pytest.mark.parametrize("known", EMBEDDED, ids=[known.name for known in EMBEDDED])
def test_an_embedded_pair_loads_small_and_with_the_defaults_its_own_config_states(known):
    folders = [package_folder(part) for part in (known.model, known.draft)]
    assert sum(file.stat().st_size for folder in folders for file in folder.iterdir()) <= 24e6
    stated = json.loads((folders[0] / "generation_config.json").read_text())
    assert known.sampling == Sampling(**{key: stated[key] for key in ("temperature", "top_p", "top_k")})
    pair = load(known.name)
    assert pair.draft is not None and set(stated["eos_token_id"]) <= pair.stop_ids and pair.revision is None


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(OptionError, match="no pair is called 'huge'; known are flagship, tiny, qwen3.6-27b"):
        preset("huge")


@pytest.mark.parametrize(
    "apple, usable, name",
    [(True, 17.2e9, "flagship"), (True, 16.6e9, "tiny"), (False, 500e9, "tiny")],
)
def test_the_default_is_the_flagship_on_a_mac_with_room_for_it_else_tiny(monkeypatch, apple, usable, name):
    monkeypatch.setattr("dflash_mlx.fit.is_apple_silicon", lambda: apple)
    monkeypatch.setattr("dflash_mlx.fit.memory", lambda: Memory(24 * 2**30, int(usable), "a test"))
    asked, notices = pairing.request(None, None, None)
    assert asked.name == name
    assert len(notices) == 1 and notices[0].startswith(f"pair: {name} (the default")


def test_a_preset_brings_its_draft_bits_and_an_option_overrides_them():
    assert pairing.request("flagship", None, None)[0].draft_bits == 4
    assert pairing.request("flagship", None, None, draft_bits=8)[0].draft_bits == 8
    assert pairing.request("flagship", None, None, draft_bits=16)[0].draft_bits == 16
    assert pairing.request("flagship", None, None, speculate=False)[0].draft is None


@pytest.mark.parametrize(
    "options, message",
    [
        ({"pair": "tiny", "model": "a/b"}, "give --pair, or --model with --draft"),
        ({"pair": "tiny", "draft": "a/b"}, "give --pair, or --model with --draft"),
        ({"draft": "a/b"}, "needs a model beside it"),
        ({"revision": "main"}, "needs a model beside it"),
        ({"model": "a/b", "draft_bits": 3}, "draft_bits must be 4 or 8"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        pairing.request(**{"pair": None, "model": None, "draft": None} | options)


def test_a_model_alone_is_plain_decoding_and_says_which_pair_would_draft():
    asked, notices = pairing.request(None, "mlx-community/Qwen3.8-27B-4bit", None)
    assert asked.draft is None and "plain decoding (--pair flagship has one)" in notices[0]
    assert pairing.request(None, "some/model", None)[1][0].endswith("plain decoding")
