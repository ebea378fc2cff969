"""Target states for training: computed in the step, or captured once to disk and memory-mapped.

A cache folder is named by a fingerprint of all that its content depends on: what the target computes (weights,
constants, dtype), the token ids and loss masks (which tokenizer, template, data and length end in), and by the tapped
layers. So a cache of another configuration is never read; a new one is written beside it. A cache that holds more
layers than a draft needs serves it too: one capture is enough for all variants.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Protocol

import torch
from rich.progress import Progress
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from data.batch import Batch, Sequences
from spec_decode.checkpoint import write_atomically
from spec_decode.errors import DraftwrightError
from spec_decode.target import Target

SHARD_TOKENS = 32_768
CAPTURE_TOKENS = 2_048  # tokens in one forward pass of the target


class FeatureSource(Protocol):
    """Documents with their target states. lengths: tokens of every document."""

    sequences: Sequences
    lengths: list[int]

    def batch(self, documents: Sequence[int]) -> Batch:
        """The packed batch of these documents, in the order given."""
        ...


def run_target(target: Target, documents: list[Tensor], taps: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    """(features [T, taps * H], last_hidden [T, H]) of every document from one forward pass.

    Documents are padded on the right: under causal attention no real token sees the padding. Without taps features
    are [T, 0].
    """
    ids = torch.nn.utils.rnn.pad_sequence([document.long() for document in documents], batch_first=True)
    with torch.no_grad():
        output = target.forward(ids.to(target.device), taps=taps, last_hidden=True)
    assert output.last_hidden is not None
    features = output.last_hidden[..., :0] if output.features is None else output.features
    return [
        (features[row, : document.numel()], output.last_hidden[row, : document.numel()])
        for row, document in enumerate(documents)
    ]


class OnlineFeatures:
    """Runs the target for every batch: nothing on disk, the target's forward pass in each step."""

    def __init__(self, target: Target, sequences: Sequences, taps: tuple[int, ...]) -> None:
        self.target, self.sequences, self.taps = target, sequences, taps
        self.lengths = sequences.offsets.diff().tolist()

    def batch(self, documents: Sequence[int]) -> Batch:
        states = run_target(self.target, [self.sequences[document][0] for document in documents], self.taps)
        return _pack(self.sequences, documents, states)


class NoFeatures:
    """Documents alone, for a variant that runs the target itself; both states are [N, 0]."""

    def __init__(self, sequences: Sequences) -> None:
        self.sequences = sequences
        self.lengths = sequences.offsets.diff().tolist()

    def batch(self, documents: Sequence[int]) -> Batch:
        nothing = [torch.empty(self.lengths[document], 0) for document in documents]
        return _pack(self.sequences, documents, list(zip(nothing, nothing, strict=True)))


class CachedFeatures:
    """Reads the layers `taps` of a folder written by `capture`."""

    def __init__(self, folder: Path, sequences: Sequences, taps: tuple[int, ...]) -> None:
        self.sequences = sequences
        self.lengths = sequences.offsets.diff().tolist()
        manifest = json.loads((folder / "manifest.json").read_text())
        self._places: list[list[int]] = manifest["places"]  # document -> [shard, first row]
        stored = manifest["taps"]
        # Which of the stored layers to take; None for all, since choosing copies.
        self._chosen = None if list(taps) == stored else [stored.index(tap) for tap in taps]
        self._stored = len(stored)
        try:
            self._shards = [safe_open(folder / name, framework="pt") for name in manifest["shards"]]
        except (OSError, SafetensorError) as error:
            raise DraftwrightError(
                f"the feature cache {folder} is damaged ({error}): delete the folder to capture it again"
            ) from error

    def batch(self, documents: Sequence[int]) -> Batch:
        return _pack(self.sequences, documents, [self._read(document) for document in documents])

    def _read(self, document: int) -> tuple[Tensor, Tensor]:
        shard, row = self._places[document]
        rows = slice(row, row + self.lengths[document])
        last_hidden = self._shards[shard].get_slice("last_hidden")[rows]
        if self._chosen == []:
            return last_hidden[:, :0], last_hidden
        features = self._shards[shard].get_slice("features")[rows]
        if self._chosen is not None:
            features = features.unflatten(-1, (self._stored, -1))[:, self._chosen].flatten(1)
        return features, last_hidden


def cached_features(
    target: Target, sequences: Sequences, taps: tuple[int, ...], root: str | Path, name: str
) -> CachedFeatures:
    """Features of `sequences` from a cache under `root` that holds these layers, captured first if there is none.

    Raises DraftwrightError if the disk is full, the folder can't be written or a shard is damaged.
    """
    identity = fingerprint(target, sequences)
    parent = Path(root).expanduser() / "features"
    prefix = f"{name}-{identity}-"
    for found in sorted(parent.glob(f"{prefix}*")):
        stored = _stored_taps(found, identity)
        if stored is not None and set(taps) <= set(stored):
            return CachedFeatures(found, sequences, taps)
    folder = parent / (prefix + ("-".join(map(str, taps)) or "last"))
    capture(target, sequences, taps, folder, identity)
    return CachedFeatures(folder, sequences, taps)


def fingerprint(target: Target, sequences: Sequences) -> str:
    """A hash of everything that the states depend on, beside the layers that are tapped."""
    digest = sha256(target.identity().encode())
    for tensor in (sequences.ids, sequences.loss_mask, sequences.offsets):
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def capture(target: Target, sequences: Sequences, taps: tuple[int, ...], folder: Path, identity: str) -> None:
    """Write the states of all documents as safetensors shards; manifest.json comes last and makes them valid.

    Complete shards that an interrupted or another process left under the same identity are kept.
    """
    lengths: list[int] = sequences.offsets.diff().tolist()
    shards = _plan(lengths, f"{identity} {list(taps)}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        missing = [shard for shard in shards if not shard.is_written(folder)]
        size = (len(taps) + 1) * target.spec.hidden_size * target.dtype.itemsize
        tokens = sum(lengths[document] for shard in missing for document in shard.documents())
        _check_space(folder, size * tokens)
        with Progress() as progress:
            task = progress.add_task(f"capturing {tokens:,} tokens of target states", total=tokens)
            for shard in missing:
                _write_shard(target, sequences, taps, folder, shard, partial(progress.advance, task))
        manifest = {
            "fingerprint": identity,
            "taps": list(taps),
            "shards": [shard.name for shard in shards],
            "places": _places(shards, lengths),
        }
        write_atomically(folder / "manifest.json", lambda path: path.write_text(json.dumps(manifest)))
    except (OSError, SafetensorError) as error:
        raise DraftwrightError(
            f"could not write the feature cache to {folder} ({error}): free space, or set cache_dir=FOLDER or "
            "features=online"
        ) from error


@dataclass(frozen=True)
class _Shard:
    """One file of a cache. batches: the documents in it, as they go through the target."""

    name: str
    identity: str
    batches: list[list[int]]

    def documents(self) -> list[int]:
        return [document for batch in self.batches for document in batch]

    def metadata(self) -> dict[str, str]:
        """What the file says about itself; it determines every number in the file."""
        return {"fingerprint": self.identity, "documents": json.dumps(self.documents())}

    def is_written(self, folder: Path) -> bool:
        """Whether the folder holds this shard, complete."""
        try:
            with safe_open(folder / self.name, framework="pt") as file:
                return file.metadata() == self.metadata()
        except (OSError, SafetensorError):
            return False


def _plan(lengths: list[int], identity: str) -> list[_Shard]:
    """Shards of about SHARD_TOKENS tokens. A pure function, so that a later capture finds the shards of an earlier."""
    shards: list[_Shard] = []
    tokens = SHARD_TOKENS
    for batch in batches_by_length(lengths):
        if tokens >= SHARD_TOKENS:
            shards.append(_Shard(f"shard-{len(shards):05d}.safetensors", identity, []))
            tokens = 0
        shards[-1].batches.append(batch)
        tokens += sum(lengths[document] for document in batch)
    return shards


def _places(shards: list[_Shard], lengths: list[int]) -> list[list[int]]:
    """[shard, first row] of every document."""
    places: list[list[int]] = [[]] * len(lengths)
    for number, shard in enumerate(shards):
        row = 0
        for document in shard.documents():
            places[document] = [number, row]
            row += lengths[document]
    return places


def _write_shard(
    target: Target,
    sequences: Sequences,
    taps: tuple[int, ...],
    folder: Path,
    shard: _Shard,
    advance: Callable[[int], None],
) -> None:
    states: list[tuple[Tensor, Tensor]] = []
    for batch in shard.batches:
        documents = [sequences[document][0] for document in batch]
        states += run_target(target, documents, taps)
        advance(sum(document.numel() for document in documents))
    features, last_hidden = (torch.cat(parts).cpu() for parts in zip(*states, strict=True))
    tensors = {"features": features, "last_hidden": last_hidden}
    write_atomically(folder / shard.name, lambda path: save_file(tensors, path, metadata=shard.metadata()))


def batches_by_length(lengths: list[int]) -> Iterator[list[int]]:
    """Documents in batches of similar length, about CAPTURE_TOKENS each, so that little is padded."""
    order = sorted(range(len(lengths)), key=lambda document: (-lengths[document], document))
    batch: list[int] = []
    for document in order:
        batch.append(document)
        if len(batch) * lengths[batch[0]] >= CAPTURE_TOKENS:
            yield batch
            batch = []
    if batch:
        yield batch


def _stored_taps(folder: Path, identity: str) -> list[int] | None:
    """The layers that a complete cache with this fingerprint holds; None for anything else."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        return list(manifest["taps"]) if manifest["fingerprint"] == identity else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DraftwrightError(
            f"the feature cache needs {needed / 1e9:.1f} GB but {folder} has {free / 1e9:.1f} GB free: lower "
            "train_tokens, or set cache_dir=FOLDER or features=online"
        )


def _pack(sequences: Sequences, documents: Sequence[int], states: list[tuple[Tensor, Tensor]]) -> Batch:
    ids, masks = zip(*(sequences[document] for document in documents), strict=True)
    lengths = torch.tensor([0, *(part.numel() for part in ids)])
    features, last_hidden = (torch.cat(parts) for parts in zip(*states, strict=True))
    return Batch(torch.cat(ids).long(), torch.cat(masks), lengths.cumsum(0), features, last_hidden)
