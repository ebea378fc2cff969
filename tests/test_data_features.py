"""Online and cached target states, and what happens to a cache that doesn't fit."""

from __future__ import annotations

import errno

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from data import features
from data.batch import Sequences
from data.features import OnlineFeatures, cached_features, fingerprint
from spec_decode.errors import DraftwrightError
from spec_decode.target_hf import HFTarget

TAPS = (2, 3, 4)


def make_target(seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return HFTarget(LlamaForCausalLM(config), "tiny")


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.fixture
def sequences():
    lengths = [5, 9, 3, 7, 8]
    ids = torch.randint(50, (sum(lengths),), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    return Sequences(ids, ids % 2 == 0, torch.tensor([0, *lengths]).cumsum(0))


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch):
    monkeypatch.setattr(features, "SHARD_TOKENS", 12)
    monkeypatch.setattr(features, "CAPTURE_TOKENS", 10)


def test_cached_states_are_those_of_each_document_alone(target, sequences, tmp_path):
    cached = cached_features(target, sequences, TAPS, tmp_path, "train")
    assert len(list(tmp_path.rglob("*.safetensors"))) > 1
    batch = cached.batch([3, 0])
    assert batch.offsets.tolist() == [0, 7, 12]
    for document, rows in ((3, slice(0, 7)), (0, slice(7, 12))):
        ids, mask = sequences[document]
        output = target.forward(ids[None].long(), taps=TAPS, last_hidden=True)
        assert torch.equal(batch.ids[rows], ids.long())
        assert torch.equal(batch.loss_mask[rows], mask)
        torch.testing.assert_close(batch.features[rows], output.features[0])
        torch.testing.assert_close(batch.last_hidden[rows], output.last_hidden[0])


def test_online_equals_cache(target, sequences, tmp_path):
    cached = cached_features(target, sequences, TAPS, tmp_path, "train").batch([1, 4, 2])
    online = OnlineFeatures(target, sequences, TAPS).batch([1, 4, 2])
    for left, right in zip(vars(cached).values(), vars(online).values(), strict=True):
        torch.testing.assert_close(left, right)


def test_a_cache_is_captured_once(target, sequences, tmp_path, monkeypatch):
    cached_features(target, sequences, TAPS, tmp_path, "train")
    monkeypatch.setattr(features, "capture", lambda *_: pytest.fail("captured again"))
    cached_features(target, sequences, TAPS, tmp_path, "train")


def test_everything_that_matters_changes_the_fingerprint(target, sequences):
    other_ids = Sequences((sequences.ids + 1) % 50, sequences.loss_mask, sequences.offsets)
    other_mask = Sequences(sequences.ids, ~sequences.loss_mask, sequences.offsets)
    prints = {
        fingerprint(target, sequences, TAPS),
        fingerprint(target, sequences, (1, 3, 4)),
        fingerprint(make_target(seed=1), sequences, TAPS),
        fingerprint(target, other_ids, TAPS),
        fingerprint(target, other_mask, TAPS),
        fingerprint(HFTarget(make_target().model.double(), "tiny"), sequences, TAPS),
    }
    assert len(prints) == 6


def test_a_cache_of_another_configuration_is_captured_again(target, sequences, tmp_path):
    """Somebody renames a folder: its manifest still says what it belongs to."""
    cached_features(target, sequences, (1, 3, 4), tmp_path, "train")
    wrong = tmp_path / "features" / f"train-{fingerprint(target, sequences, (1, 3, 4))}"
    wrong.rename(tmp_path / "features" / f"train-{fingerprint(target, sequences, TAPS)}")
    batch = cached_features(target, sequences, TAPS, tmp_path, "train").batch([0])
    output = target.forward(sequences[0][0][None].long(), taps=TAPS)
    torch.testing.assert_close(batch.features, output.features[0])


def test_a_killed_capture_leaves_no_valid_cache(target, sequences, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(features, "run_target", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            cached_features(target, sequences, TAPS, tmp_path, "train")
    assert not list(tmp_path.rglob("manifest.json"))
    assert cached_features(target, sequences, TAPS, tmp_path, "train").batch([2]).ids.numel() == 3


def test_a_damaged_shard_is_named(target, sequences, tmp_path):
    cached_features(target, sequences, TAPS, tmp_path, "train")
    shard = next(tmp_path.rglob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-50])
    with pytest.raises(DraftwrightError, match="delete the folder to capture it again"):
        cached_features(target, sequences, TAPS, tmp_path, "train")


def test_too_little_space_is_refused_before_anything_is_written(target, sequences, tmp_path, monkeypatch):
    monkeypatch.setattr(features.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10})())
    with pytest.raises(DraftwrightError, match=r"needs 0.0 GB but .* has 0.0 GB free"):
        cached_features(target, sequences, TAPS, tmp_path, "train")
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
def test_a_failing_disk_says_what_to_do(target, sequences, tmp_path, monkeypatch, code):
    def fail(*_):
        raise OSError(code, "disk trouble")

    monkeypatch.setattr(features, "save_file", fail)
    with pytest.raises(DraftwrightError, match="free space, or set cache_dir=FOLDER or features=online"):
        cached_features(target, sequences, TAPS, tmp_path, "train")
    assert not list(tmp_path.rglob("*.safetensors*"))
