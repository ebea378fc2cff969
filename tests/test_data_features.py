"""Online and cached target states, and what happens to a cache that doesn't fit."""

from __future__ import annotations

import errno
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import Barrier
from unittest.mock import Mock

import pytest
import torch

from data import features
from data.batch import Sequences
from data.features import OnlineFeatures, cached_features, fingerprint
from spec_decode.errors import DraftwrightError
from spec_decode.target_hf import HFTarget

TAPS = (2, 3, 4)


@pytest.fixture(scope="module")
def target(tiny_llama):
    return HFTarget(tiny_llama(), "tiny")


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


def test_everything_that_matters_changes_the_fingerprint(target, sequences, tiny_llama):
    def of(model, name="tiny"):
        return fingerprint(HFTarget(model, name), sequences)

    other_ids = Sequences((sequences.ids + 1) % 50, sequences.loss_mask, sequences.offsets)
    other_mask = Sequences(sequences.ids, ~sequences.loss_mask, sequences.offsets)
    prints = {
        fingerprint(target, sequences),
        of(tiny_llama(seed=1)),
        of(tiny_llama(rope_parameters={"rope_type": "default", "rope_theta": 500.0})),
        of(tiny_llama(rms_norm_eps=1e-3)),
        of(tiny_llama(hidden_act="gelu")),
        of(tiny_llama(num_attention_heads=2, head_dim=16)),  # weights of the same shapes
        fingerprint(target, other_ids),
        fingerprint(target, other_mask),
        of(tiny_llama().double()),
    }
    assert len(prints) == 9
    assert of(tiny_llama(), name="another name") == fingerprint(target, sequences)


def test_the_weights_are_hashed_once(tiny_llama, sequences, monkeypatch):
    target = HFTarget(tiny_llama(), "tiny")
    first = fingerprint(target, sequences)
    monkeypatch.setattr(target.model, "state_dict", lambda: pytest.fail("hashed again"))
    assert fingerprint(target, sequences.prefix(5)) != first


def test_a_model_has_the_same_fingerprint_in_memory_and_from_a_folder(tiny_llama, sequences, tmp_path):
    model = tiny_llama()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float32)
    prints = {fingerprint(HFTarget(each), sequences) for each in (model, loaded)}
    assert len(prints) == 1


def test_a_cache_of_another_configuration_is_captured_again(target, sequences, tmp_path):
    """Somebody renames a folder: its manifest still says what it belongs to."""
    cached_features(target, sequences, (1, 3, 4), tmp_path, "train")
    (wrong,) = (tmp_path / "features").iterdir()
    wrong.rename(wrong.with_name(wrong.name.replace("1-3-4", "-".join(map(str, TAPS)))))
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


def counting(monkeypatch, stop_after=None):
    """Documents that went through the target; with stop_after, the capture is killed after so many batches."""
    seen, run_target = [], features.run_target

    def run(target, documents, taps):
        if len(seen) == stop_after:
            raise KeyboardInterrupt
        seen.append([document.tolist() for document in documents])
        return run_target(target, documents, taps)

    monkeypatch.setattr(features, "run_target", run)
    return seen


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(vars(left).values(), vars(right).values(), strict=True))


@pytest.mark.parametrize("batches", [0, 1, 2])
def test_a_killed_capture_goes_on_where_it_was(target, sequences, tmp_path, monkeypatch, batches):
    """The documents make three shards of one batch each."""
    with monkeypatch.context() as patch:
        everything = counting(patch)
        whole = cached_features(target, sequences, TAPS, tmp_path / "whole", "train").batch(range(5))
    with monkeypatch.context() as patch:
        counting(patch, stop_after=batches)
        with pytest.raises(KeyboardInterrupt):
            cached_features(target, sequences, TAPS, tmp_path, "train")
    assert len(list(tmp_path.glob("features/*/*.safetensors"))) == batches
    with monkeypatch.context() as patch:
        seen = counting(patch)
        needed = []
        patch.setattr(features, "_check_space", lambda _folder, size: needed.append(size))
        resumed = cached_features(target, sequences, TAPS, tmp_path, "train").batch(range(5))
    assert len(everything) == 3
    assert seen == everything[batches:]
    assert needed == [4 * 4 * 32 * sum(len(ids) for batch in seen for ids in batch)]
    assert same(resumed, whole)


def test_a_truncated_shard_of_a_killed_capture_is_written_again(target, sequences, tmp_path, monkeypatch):
    whole = cached_features(target, sequences, TAPS, tmp_path, "train").batch(range(5))
    next(tmp_path.rglob("manifest.json")).unlink()
    shard = sorted(tmp_path.rglob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-50])
    seen = counting(monkeypatch)
    assert same(cached_features(target, sequences, TAPS, tmp_path, "train").batch(range(5)), whole)
    assert len(seen) == 1


def test_captures_at_the_same_time_do_not_disturb_each_other(target, sequences, tmp_path, tiny_llama, monkeypatch):
    whole = cached_features(target, sequences, TAPS, tmp_path / "alone", "train").batch(range(5))
    monkeypatch.setattr(features, "Progress", lambda: nullcontext(Mock()))  # one terminal shows one bar
    meeting, capture = Barrier(3), features.capture

    def all_found_nothing(*arguments):
        meeting.wait(timeout=60)
        return capture(*arguments)

    monkeypatch.setattr(features, "capture", all_found_nothing)
    targets = [HFTarget(tiny_llama(), "tiny") for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        caches = pool.map(lambda each: cached_features(each, sequences, TAPS, tmp_path, "train"), targets)
        assert all(same(cache.batch(range(5)), whole) for cache in caches)
    (folder,) = (tmp_path / "features").iterdir()
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


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
    def fail(*_, **__):
        raise OSError(code, "disk trouble")

    monkeypatch.setattr(features, "save_file", fail)
    with pytest.raises(DraftwrightError, match="free space, or set cache_dir=FOLDER or features=online"):
        cached_features(target, sequences, TAPS, tmp_path, "train")
    assert not list(tmp_path.rglob("*.safetensors*"))
