"""Online and cached target states, and what happens to a cache that doesn't fit."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from data import features, states
from data.batch import Sequences
from data.features import Features, fingerprint
from spec_decode.errors import DraftwrightError
from spec_decode.target_hf import HFTarget

TAPS = (2, 3, 4)


def cached_features(*arguments, dtype="same", **options):
    """States as the target computes them, unless a test is about how they are stored."""
    return features.cached_features(*arguments, dtype=dtype, **options)


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
    monkeypatch.setattr(states, "SHARD_TOKENS", 12)
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
    online = Features(target, sequences, TAPS).batch([1, 4, 2])
    for left, right in zip(cached.tensors().values(), online.tensors().values(), strict=True):
        torch.testing.assert_close(left, right)


def test_nothing_behind_the_last_supervised_token_is_kept(sequences):
    trimmed = sequences.trimmed()
    assert len(trimmed) == len(sequences)
    for (ids, mask), (kept, kept_mask) in zip(sequences, trimmed, strict=True):
        last = int(mask.nonzero()[-1]) if mask.any() else -1
        assert kept.tolist() == ids[: last + 1].tolist()
        assert kept_mask.tolist() == mask[: last + 1].tolist()


def test_a_cache_is_captured_once(target, sequences, tmp_path, monkeypatch):
    cached_features(target, sequences, TAPS, tmp_path, "train")
    monkeypatch.setattr(features, "run_target", lambda *_: pytest.fail("captured again"))
    cached_features(target, sequences, TAPS, tmp_path, "train").batch(range(5))


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
        fingerprint(target, sequences, "float8"),
        of(tiny_llama().double()),
    }
    assert len(prints) == 10
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
    return all(torch.equal(a, b) for a, b in zip(left.tensors().values(), right.tensors().values(), strict=True))


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
        patch.setattr(features, "check_space", lambda _folder, size, _tokens: needed.append(size))
        resumed = cached_features(target, sequences, TAPS, tmp_path, "train").batch(range(5))
    assert len(everything) == 3
    assert seen == everything[batches:]
    assert needed == [4 * 4 * 32 * sum(len(ids) for batch in seen for ids in batch)][: len(seen)]
    assert same(resumed, whole)


def damage(shard, how):
    content = bytearray(shard.read_bytes())
    if how == "truncated":
        del content[-50:]
    else:
        content[-50] ^= 1
    shard.write_bytes(content)


@pytest.mark.parametrize("how", ["truncated", "one bit flipped"])
def test_a_damaged_shard_is_rebuilt_and_said_so(target, sequences, tmp_path, monkeypatch, capsys, how):
    whole = cached_features(target, sequences, TAPS, tmp_path, "train").batch(range(5))
    shard = sorted(tmp_path.rglob("*.safetensors"))[0]
    damage(shard, how)
    capsys.readouterr()
    seen = counting(monkeypatch)
    assert same(cached_features(target, sequences, TAPS, tmp_path, "train").batch(range(5)), whole)
    assert len(seen) == 1
    assert f"shard {shard} is damaged" in capsys.readouterr().out
    cached_features(target, sequences, TAPS, tmp_path, "train")
    assert len(seen) == 1  # it is right again


def test_hybrid_computes_each_document_once_and_equals_the_cache(target, sequences, tmp_path, monkeypatch):
    cached = cached_features(target, sequences, TAPS, tmp_path / "cache", "train")
    hybrid = cached_features(target, sequences, TAPS, tmp_path, "train", hybrid=True)
    assert not list(tmp_path.glob("features/*"))  # nothing is written before it trains
    seen = counting(monkeypatch)
    for documents in ([3, 0], [1], [4, 2], [2, 0], [1, 4, 3]):
        for left, right in zip(
            hybrid.batch(documents).tensors().values(), cached.batch(documents).tensors().values(), strict=True
        ):
            torch.testing.assert_close(left, right)
    assert [len(batch) for batch in seen] == [2, 1, 2]
    hybrid.flush()
    again = cached_features(target, sequences, TAPS, tmp_path, "train", hybrid=True)
    assert same(again.batch(range(5)), hybrid.batch(range(5)))
    assert len(seen) == 3


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 2**-8), ("float8", 2**-4)])
def test_states_are_stored_in_another_dtype_and_read_in_the_targets(target, sequences, tmp_path, dtype, tolerance):
    """Largest relative error: half a unit in the last place, of 8 bits and of 4; float8 has subnormals near 0."""
    cached = cached_features(target, sequences, TAPS, tmp_path, "train", dtype=dtype).batch([1, 4])
    exact = cached_features(target, sequences, TAPS, tmp_path, "train").batch([1, 4])
    for stored, wanted in ((cached.features, exact.features), (cached.last_hidden, exact.last_hidden)):
        assert stored.dtype == torch.float32
        assert not torch.equal(stored, wanted)
        small = wanted.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True).expand(-1, -1, 32).flatten(1) * 2**-15
        assert ((stored - wanted).abs() <= wanted.abs() * tolerance + small).all()
    hybrid = cached_features(target, sequences, TAPS, tmp_path / "hybrid", "train", dtype=dtype, hybrid=True)
    assert same(hybrid.batch([1, 4]), hybrid.batch([1, 4]))


def test_the_size_on_disk_is_what_was_said(target, sequences, tmp_path, monkeypatch):
    for dtype, width in (("bfloat16", 2 * 32), ("float8", 32 + 4), ("same", 4 * 32)):
        said = []
        monkeypatch.setattr(features, "check_space", lambda _folder, size, _tokens, said=said: said.append(size))
        cached_features(target, sequences, TAPS, tmp_path / dtype, "train", dtype=dtype)
        assert said == [4 * width * 32]  # 4 states of 32 tokens
        stored = 0
        for path in tmp_path.glob(f"{dtype}/*/*/*.safetensors"):
            raw = path.read_bytes()
            stored += len(raw) - 8 - int.from_bytes(raw[:8], "little")
        assert stored == said[0]


CAPTURE = """
import sys, torch
from transformers import LlamaForCausalLM
from data import features, states
from data.batch import Sequences
from spec_decode.target_hf import HFTarget
states.SHARD_TOKENS, features.CAPTURE_TOKENS = 60, 40
model, root, kill = sys.argv[1:]
lengths = [3 + i % 9 for i in range(60)]
ids = torch.randint(50, (sum(lengths),), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
data = Sequences(ids, ids % 2 == 0, torch.tensor([0, *lengths]).cumsum(0))
target = HFTarget(LlamaForCausalLM.from_pretrained(model, dtype=torch.float32), "tiny")
print("ready", flush=True)
sys.stdin.readline()
if kill == "slow":
    import time
    run = features.run_target
    features.run_target = lambda *a: (time.sleep(0.2), run(*a))[1]
batch = features.cached_features(target, data, (2, 4), root, "train").batch(range(60))
print(float(batch.features.double().sum()), float(batch.last_hidden.double().sum()))
"""


@pytest.fixture
def process(tiny_llama, tmp_path):
    """process(root, kill=""): another Python that captures into `root` once it is told to."""
    tiny_llama().save_pretrained(tmp_path / "model")
    place = Path(__file__).resolve().parent.parent
    started = []

    def start(root, kill=""):
        command = [sys.executable, "-c", CAPTURE, str(tmp_path / "model"), str(root), kill]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, cwd=place, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes))
        assert started[-1].stdout.readline() == "ready\n"
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.communicate()


def finish(*processes):
    """The last line that each prints."""
    for each in processes:
        each.stdin.write("\n")
        each.stdin.flush()
    lines = [each.communicate(timeout=120)[0].splitlines()[-1] for each in processes]
    assert [each.returncode for each in processes] == [0] * len(processes)
    return lines


def test_processes_that_capture_at_once_do_not_corrupt_each_other(process, tmp_path):
    alone = finish(process(tmp_path / "alone"))
    together = finish(*[process(tmp_path / "together") for _ in range(2)])
    assert together == alone * 2
    (folder,) = (tmp_path / "together" / "features").iterdir()
    assert {path.suffix for path in folder.iterdir()} == {".safetensors"}
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    assert finish(process(tmp_path / "together")) == alone


def test_a_capture_killed_with_sigkill_goes_on(process, tmp_path):
    alone = finish(process(tmp_path / "alone"))
    killed = process(tmp_path / "killed", "slow")
    killed.stdin.write("\n")
    killed.stdin.flush()
    deadline = time.monotonic() + 60
    while len(found := list(tmp_path.glob("killed/features/*/shard-*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    killed.kill()
    killed.wait()
    kept = {path: path.stat().st_mtime_ns for path in found}
    assert len(kept) >= 2
    assert finish(process(tmp_path / "killed")) == alone
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert len(list(tmp_path.glob("killed/features/*/shard-*"))) > len(kept)


def test_too_little_space_is_refused_before_anything_is_written(target, sequences, tmp_path, monkeypatch):
    monkeypatch.setattr(states.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10})())
    with pytest.raises(DraftwrightError, match=r"needs 0.0 GB but .* has 0.0 GB free"):
        cached_features(target, sequences, TAPS, tmp_path, "train")
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
def test_a_failing_disk_says_what_to_do(target, sequences, tmp_path, monkeypatch, code):
    def fail(*_, **__):
        raise OSError(code, "disk trouble")

    monkeypatch.setattr(states, "save_file", fail)
    with pytest.raises(DraftwrightError, match="free space, or set cache_dir=FOLDER or features=online"):
        cached_features(target, sequences, TAPS, tmp_path, "train")
    assert not list(tmp_path.rglob("*.safetensors*"))
