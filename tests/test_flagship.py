"""The flagship pair without its weights: every tensor as published, in sparse files, through the real loading path."""

import json
import resource
import shutil
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from dflash_mlx import fit, pairing
from dflash_mlx.decode import block_for
from dflash_mlx.errors import CheckpointError
from dflash_mlx.loading import load
from dflash_mlx.models.presets import preset
from dflash_mlx.types import Options

DATA = Path(__file__).parent / "data" / "checkpoints"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@pytest.fixture(scope="module")
def manifest():
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    import flagship_manifest

    yield flagship_manifest
    patch.undo()
    del sys.modules["flagship_manifest"]


@pytest.fixture(scope="module")
def folders(manifest, tmp_path_factory):
    """Both checkpoints at full size on paper; on disk they take the room of their headers."""
    home = tmp_path_factory.mktemp("flagship")
    manifest.write_folder(home / "target", manifest.target_config(), manifest.target_tensors())
    manifest.write_folder(home / "draft", manifest.draft_config(), manifest.draft_tensors())
    (home / "target" / "generation_config.json").write_text(json.dumps(manifest.generation_config()))
    for name in TOKENIZER:  # the tokenizer is not what is tested here, and the real one has 20 MB
        shutil.copy(DATA / "t-hybrid-fp32" / name, home / "target")
    return home


@pytest.fixture(scope="module")
def pair(folders):
    mx.reset_peak_memory()
    return load(model=str(folders / "target"), draft=str(folders / "draft"), draft_bits=16, lazy=True)


def test_the_manifest_adds_up_to_the_published_counts_and_bytes(manifest):
    target, draft = manifest.target_tensors(), manifest.draft_tensors()
    assert len(target) == 2180 and sum(name.startswith("vision_tower.") for name in target) == 333
    assert sum(name.endswith(".scales") for name in target) == 498
    assert sum(spec.size for spec in target.values()) == manifest.TARGET_PAYLOAD
    assert len(draft) == 81 and sum(spec.size for spec in draft.values()) == manifest.DRAFT_PAYLOAD


def test_the_files_are_three_shards_with_an_index_and_take_no_room(folders):
    files = sorted((folders / "target").glob("*.safetensors"))
    assert [file.name for file in files] == [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]
    assert all(5.3e9 < file.stat().st_size < 5.4e9 for file in files)
    assert sum(file.stat().st_blocks * 512 for file in files) < 2e6
    assert len(json.loads((folders / "target" / "model.safetensors.index.json").read_text())["weight_map"]) == 2180


def test_every_text_tensor_is_loaded_with_its_dtype_and_none_else(manifest, pair):
    """mlx-lm loads strictly, so a missing or surplus tensor would have been an error; vision is left out."""
    loaded = {f"language_model.{name}": array for name, array in tree_flatten(pair.target.model.parameters())}
    wanted = {name: spec for name, spec in manifest.target_tensors().items() if name.startswith("language_model.")}
    assert loaded.keys() == wanted.keys()
    dtypes = {"U32": mx.uint32, "BF16": mx.bfloat16}
    for name, spec in wanted.items():
        assert loaded[name].shape == spec.shape and loaded[name].dtype == dtypes[spec.dtype], name


def test_the_target_is_recognised_as_4_bit_triplets(pair):
    kinds = (nn.QuantizedLinear, nn.QuantizedEmbedding)
    quantized = [module for module in pair.target.model.modules() if isinstance(module, kinds)]
    assert len(quantized) == 498
    assert {(module.bits, module.group_size) for module in quantized} == {(4, 64)}
    assert pair.target_config.bits == 4 and pair.target_config.family == "qwen3_5"


def test_the_draft_is_a_dflash_2_with_codebooks_and_nothing_missing(manifest, pair):
    loaded = dict(tree_flatten(pair.draft.parameters()))
    assert len(loaded) == 81
    assert sum(array.nbytes for array in loaded.values()) == manifest.DRAFT_PAYLOAD
    selector = pair.draft.candidate_selector
    assert selector.predecessor_codebook.weight.shape == selector.successor_codebook.weight.shape == (248320, 256)
    config = pair.draft_config
    assert (config.version, config.block_size, config.mask_token_id) == (2, 8, 248070)
    assert config.taps == (5, 19, 33, 47, 61) and config.windows == (2048,) * 5 and not any(config.causal)
    assert config.context_rows == 2047 and config.rope_theta == 1e7


def test_it_stops_at_both_end_tokens(pair):
    assert {248046, 248044} <= pair.stop_ids
    assert pair.target_config.eos_ids == (248046, 248044)


def test_its_block_is_capped_at_five(pair):
    assert block_for(pair.target, pair.draft, Options()) == (5, None)
    assert block_for(pair.target, pair.draft, Options(block_cap=False)) == (8, None)


def test_loading_reads_headers_only(pair):
    assert mx.get_peak_memory() < 200e6
    unit = 1 if sys.platform == "darwin" else 1024
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit < 2.5e9


def test_an_unquantized_draft_beside_a_4_bit_target_is_noticed(pair):
    assert any("--draft-bits 4" in notice for notice in pair.notices)


def test_the_memory_sums_are_those_of_the_shapes(folders):
    asked, _ = pairing.request(None, str(folders / "target"), str(folders / "draft"), draft_bits=4)
    need = pairing.needed(pairing.find(asked), 4)
    assert need.state == 48 * (61_440 + 3_145_728)
    assert need.kv == 65_536 * fit.CONTEXT + 20_480 * 2048
    assert need.draft == int(3_848_808_960 * 4.5 / 16)
    assert preset("flagship").need_bytes == need.total


def test_a_cut_shard_is_named_before_anything_is_loaded(folders, tmp_path):
    home = tmp_path / "target"
    shutil.copytree(folders / "target", home, copy_function=lambda a, b: Path(b).symlink_to(a))
    shard = home / "model-00002-of-00003.safetensors"
    size = shard.stat().st_size
    with shard.open("rb") as file:
        head = file.read(200_000)
    shard.unlink()
    with shard.open("wb") as file:
        file.write(head)
        file.truncate(size - 1)
    with pytest.raises(CheckpointError, match=rf"model-00002-of-00003.*{size - 1:,} of {size:,} bytes"):
        load(model=str(home), speculate=False, lazy=True)
    shard.unlink()
    with pytest.raises(CheckpointError, match="incomplete.*model-00002-of-00003"):
        load(model=str(home), speculate=False, lazy=True)
