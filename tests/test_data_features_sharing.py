"""One capture of target states serves every draft that needs no other layers; nothing else is ever taken for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from data import features, states
from data.batch import Batch, Sequences
from data.features import Features
from spec_decode.target_hf import HFTarget

LENGTHS = [5, 9, 3, 7, 8]
DOCUMENTS = [3, 0, 4, 1, 2]


def cached_features(*arguments: Any) -> Features:
    """States as the target computes them."""
    return features.cached_features(*arguments, dtype="same")


@pytest.fixture(scope="module")
def target(tiny_llama: Callable[..., LlamaForCausalLM]) -> HFTarget:
    return HFTarget(tiny_llama(), "tiny")


@pytest.fixture(scope="module")
def sequences() -> Sequences:
    ids = torch.randint(50, (sum(LENGTHS),), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    return Sequences(ids, ids % 2 == 0, torch.tensor([0, *LENGTHS]).cumsum(0))


@pytest.fixture(autouse=True)
def captures(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The layers of every pass of the target; several shards, several documents a pass."""
    monkeypatch.setattr(states, "SHARD_TOKENS", 12)
    monkeypatch.setattr(features, "CAPTURE_TOKENS", 10)
    seen: list[tuple[int, ...]] = []
    run_target = features.run_target

    def run(target: Any, documents: Any, taps: tuple[int, ...]) -> Any:
        seen.append(taps)
        return run_target(target, documents, taps)

    monkeypatch.setattr(features, "run_target", run)
    return seen


def same(left: Batch, right: Batch) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left.tensors().values(), right.tensors().values(), strict=True))


@pytest.mark.parametrize("taps", [(), (2,), (5,), (2, 5), (2, 4), (2, 4, 5)], ids=str)
def test_a_cache_of_more_layers_serves_fewer(
    taps: tuple[int, ...], target: HFTarget, sequences: Sequences, tmp_path: Path, captures: list[Any]
) -> None:
    own = cached_features(target, sequences, taps, tmp_path / "own", "train").batch(DOCUMENTS)
    everything = cached_features(target, sequences, (2, 4, 5), tmp_path, "train").batch(DOCUMENTS)
    captures.clear()
    shared = cached_features(target, sequences, taps, tmp_path, "train").batch(DOCUMENTS)
    assert captures == []
    assert len(list((tmp_path / "features").iterdir())) == 1
    assert same(shared, own)
    assert shared.features.shape == (sum(LENGTHS), 32 * len(taps))
    columns = [column for tap in taps for column in range(32 * (2, 4, 5).index(tap), 32 * (2, 4, 5).index(tap) + 32)]
    assert torch.equal(shared.features, everything.features[:, columns])
    online = Features(target, sequences, taps).batch(DOCUMENTS)
    torch.testing.assert_close(shared.features, online.features)
    torch.testing.assert_close(shared.last_hidden, online.last_hidden)


@pytest.mark.parametrize(
    ("stored", "wanted"), [((), (2,)), ((2, 5), (2, 4, 5)), ((2, 4), (5,)), ((2, 4, 5), (3,))], ids=str
)
def test_layers_that_are_missing_are_captured_beside_it(
    stored: tuple[int, ...],
    wanted: tuple[int, ...],
    target: HFTarget,
    sequences: Sequences,
    tmp_path: Path,
    captures: list[Any],
) -> None:
    cached_features(target, sequences, stored, tmp_path, "train")
    captures.clear()
    found = cached_features(target, sequences, wanted, tmp_path, "train").batch(DOCUMENTS)
    assert set(captures) == {wanted}
    assert len(list((tmp_path / "features").iterdir())) == 2
    torch.testing.assert_close(found.features, Features(target, sequences, wanted).batch(DOCUMENTS).features)
    captures.clear()
    for taps in (stored, wanted):  # both serve from now on
        cached_features(target, sequences, taps, tmp_path, "train")
    assert captures == []


def test_other_data_another_side_and_another_target_never_match(
    target: HFTarget,
    sequences: Sequences,
    tmp_path: Path,
    captures: list[Any],
    tiny_llama: Callable[..., LlamaForCausalLM],
) -> None:
    cached_features(target, sequences, (2, 4, 5), tmp_path, "train")
    ids, mask, offsets = sequences.ids, sequences.loss_mask, sequences.offsets
    others = {
        "other tokens": (target, Sequences((ids + 1) % 50, mask, offsets), "train"),
        "another mask": (target, Sequences(ids, ~mask, offsets), "train"),
        "other documents": (target, Sequences(ids, mask, torch.tensor([0, 6, *offsets[2:].tolist()])), "train"),
        "fewer documents": (target, sequences.prefix(20), "train"),
        "another side": (target, sequences, "heldout"),
        "other weights": (HFTarget(tiny_llama(seed=1), "tiny"), sequences, "train"),
        "another dtype": (HFTarget(tiny_llama().double(), "tiny"), sequences, "train"),
    }
    for number, (case, (other, data, side)) in enumerate(others.items(), start=2):
        captures.clear()
        found = cached_features(other, data, (2, 5), tmp_path, side).batch([0])
        assert captures, case
        assert len(list((tmp_path / "features").iterdir())) == number, case
        torch.testing.assert_close(found.features, Features(other, data, (2, 5)).batch([0]).features)


def only_folder(root: Path) -> Path:
    (folder,) = (root / "features").iterdir()
    return folder


def test_a_larger_cache_that_lacks_a_shard_is_ignored(
    target: HFTarget, sequences: Sequences, tmp_path: Path, captures: list[Any]
) -> None:
    whole = cached_features(target, sequences, (2, 5), tmp_path / "whole", "train").batch(DOCUMENTS)
    cached_features(target, sequences, (2, 4, 5), tmp_path, "train")
    next(only_folder(tmp_path).iterdir()).unlink()
    captures.clear()
    assert same(cached_features(target, sequences, (2, 5), tmp_path, "train").batch(DOCUMENTS), whole)
    assert set(captures) == {(2, 5)}


def test_a_killed_capture_of_more_layers_is_not_mixed_with_one_of_fewer(
    target: HFTarget, sequences: Sequences, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, captures: list[Any]
) -> None:
    with monkeypatch.context() as patch:
        run_target = features.run_target

        def killed(*arguments: Any) -> Any:
            if captures:
                raise KeyboardInterrupt
            return run_target(*arguments)

        patch.setattr(features, "run_target", killed)
        with pytest.raises(KeyboardInterrupt):
            cached_features(target, sequences, (2, 4, 5), tmp_path, "train")
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1
    captures.clear()
    fewer = cached_features(target, sequences, (2, 5), tmp_path, "train").batch(DOCUMENTS)
    more = cached_features(target, sequences, (2, 4, 5), tmp_path, "train").batch(DOCUMENTS)
    assert captures == [(2, 5)] * 3 + [(2, 4, 5)] * 2  # the shard that was there is kept
    assert torch.equal(fewer.features, more.features[:, [*range(32), *range(64, 96)]])


def test_a_damaged_shard_of_the_larger_cache_is_rebuilt_there(
    target: HFTarget, sequences: Sequences, tmp_path: Path, captures: list[Any]
) -> None:
    whole = cached_features(target, sequences, (2, 4, 5), tmp_path, "train").batch(DOCUMENTS)
    shard = next(only_folder(tmp_path).iterdir())
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    captures.clear()
    fewer = cached_features(target, sequences, (2, 5), tmp_path, "train").batch(DOCUMENTS)
    assert captures == [(2, 4, 5)]
    assert torch.equal(fewer.features, whole.features[:, [*range(32), *range(64, 96)]])
    assert only_folder(tmp_path)


def test_states_of_other_layers_in_a_renamed_folder_are_ignored(
    target: HFTarget, sequences: Sequences, tmp_path: Path, captures: list[Any]
) -> None:
    cached_features(target, sequences, (2, 4, 5), tmp_path, "train")
    folder = only_folder(tmp_path)
    folder.rename(folder.with_name(folder.name.replace("2-4-5", "2-3-5")))
    captures.clear()
    found = cached_features(target, sequences, (2, 3, 5), tmp_path, "train").batch(DOCUMENTS)
    assert set(captures) == {(2, 3, 5)}
    torch.testing.assert_close(found.features, Features(target, sequences, (2, 3, 5)).batch(DOCUMENTS).features)


def test_what_one_process_of_a_hybrid_run_has_stored_another_reads(
    target: HFTarget, sequences: Sequences, tmp_path: Path, captures: list[Any]
) -> None:
    options: dict[str, Any] = {"dtype": "same", "hybrid": True}
    one, other = (features.cached_features(target, sequences, (2,), tmp_path, "train", **options) for _ in range(2))
    captures.clear()
    stored = one.batch([0, 1])  # 14 tokens: a shard
    one.batch([2])  # 3 tokens, not on disk yet
    assert captures == [(2,), (2,)]
    assert same(other.batch([0, 1]), stored)
    assert captures == [(2,), (2,)]
    other.batch([2])
    assert captures == [(2,), (2,), (2,)]
