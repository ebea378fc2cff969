"""Target states for training: computed in the step, read from disk, or computed once and kept on the way.

    online   run the target for every batch
    hybrid   run it for the documents that the cache lacks, and keep what it says: the first epoch captures
    cache    the same, with all documents captured before the first step

A cache folder is named by a fingerprint of all that its content depends on: what the target computes (weights,
constants, dtype), the token ids and loss masks (which tokenizer, template, data and length end in), the dtype of the
stored states, and by the tapped layers. So a cache of another configuration is never read; a new one is written beside
it. A cache that holds more layers than a draft needs serves it too: one capture is enough for all variants.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Protocol

import torch
from rich.progress import Progress
from torch import Tensor

from data.batch import Batch, Sequences
from data.states import LAST, StateDtype, States, StateStore, bytes_per_token, check_space, claimed
from spec_decode.target import Target

CAPTURE_TOKENS = 2_048  # tokens in one forward pass of the target


class FeatureSource(Protocol):
    """Documents with their target states. lengths: tokens of every document."""

    sequences: Sequences
    lengths: list[int]

    def batch(self, documents: Sequence[int]) -> Batch:
        """The packed batch of these documents, in the order given."""
        ...

    def flush(self) -> None:
        """Write what a continued run would have to compute again."""
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


class Features:
    """States of the layers `taps`. Without a store the target runs for every batch; with one it runs only for documents
    that the store lacks, which from then on has them.

    The documents that a batch lacks go through the target together and are stored together, so a run that was killed
    and continued computes the same numbers.
    """

    def __init__(
        self,
        target: Target,
        sequences: Sequences,
        taps: tuple[int, ...],
        store: StateStore | None = None,
    ) -> None:
        self.target, self.sequences, self.taps, self.store = target, sequences, taps, store
        self.lengths: list[int] = sequences.offsets.diff().tolist()

    def batch(self, documents: Sequence[int]) -> Batch:
        if self.store is None:
            return _pack(self.sequences, documents, self._run(documents, self.taps))
        if any(document not in self.store for document in documents):
            self.store.refresh()  # another process of a hybrid run may have them by now
        self._keep([document for document in documents if document not in self.store])
        names, dtype = [*map(str, self.taps), LAST], self.target.dtype
        states = [self.store.read(document, names, dtype) for document in documents]
        return _pack(self.sequences, documents, [(_beside(taps, last), last) for *taps, last in states])

    def capture(self) -> None:
        """Fill the store."""
        assert self.store is not None
        missing = self.store.missing()
        tokens = sum(self.lengths[document] for document in missing)
        if not missing:
            return
        with Progress() as progress:
            task = progress.add_task(f"capturing {tokens:,} tokens of target states", total=tokens)
            for batch in batches_by_length([self.lengths[document] for document in missing]):
                documents = [missing[index] for index in batch]
                self._keep(documents)
                progress.advance(task, sum(self.lengths[document] for document in documents))
        self.flush()

    def flush(self) -> None:
        if self.store is not None:
            self.store.flush()

    def _run(self, documents: Sequence[int], taps: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
        return run_target(self.target, [self.sequences[document][0] for document in documents], taps)

    def _keep(self, documents: Sequence[int]) -> None:
        if documents and self.store is not None:
            *layers, _ = self.store.names
            states = [_by_name(layers, *of) for of in self._run(documents, tuple(map(int, layers)))]
            self.store.add(dict(zip(documents, states, strict=True)))


class NoFeatures:
    """Documents alone, for a variant that runs the target itself; both states are [N, 0]."""

    def __init__(self, sequences: Sequences) -> None:
        self.sequences = sequences
        self.lengths = sequences.offsets.diff().tolist()

    def batch(self, documents: Sequence[int]) -> Batch:
        nothing = [torch.empty(self.lengths[document], 0) for document in documents]
        return _pack(self.sequences, documents, list(zip(nothing, nothing, strict=True)))

    def flush(self) -> None:
        pass


def cached_features(
    target: Target,
    sequences: Sequences,
    taps: tuple[int, ...],
    root: str | Path,
    name: str,
    *,
    dtype: StateDtype = "bfloat16",
    hybrid: bool = False,
) -> Features:
    """Features of `sequences` from a cache under `root` that holds these layers, captured first unless `hybrid`.

    Raises DraftwrightError if the disk has less room than the capture needs, or can't be written.
    """
    identity = fingerprint(target, sequences, dtype)
    parent = Path(root).expanduser() / "features"
    prefix, layers = f"{name}-{identity}-", [str(tap) for tap in taps]
    folder = parent / (prefix + ("-".join(layers) or LAST))
    for found in sorted(parent.glob(f"{prefix}*")):
        held = [layer for layer in found.name.removeprefix(prefix).split("-") if layer != LAST]
        if set(layers) <= set(held) and len(claimed(found, identity, [*held, LAST])) == len(sequences):
            folder, layers = found, held
            break
    store = StateStore(folder, identity, sequences.offsets.diff().tolist(), [*layers, LAST], dtype)
    features = Features(target, sequences, taps, store)
    tokens = sum(features.lengths[document] for document in store.missing())
    if tokens:
        size = bytes_per_token(len(store.names), target.spec.hidden_size, dtype, target.dtype)
        check_space(folder, size * tokens, tokens)
    if not hybrid:
        features.capture()
    return features


def fingerprint(target: Target, sequences: Sequences, dtype: StateDtype = "bfloat16") -> str:
    """A hash of everything that the stored states depend on, beside the layers that are tapped."""
    digest = sha256(f"{target.identity()} {dtype} shards".encode())
    for tensor in (sequences.ids, sequences.loss_mask, sequences.offsets):
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


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


def _by_name(layers: Sequence[str], features: Tensor, last_hidden: Tensor) -> States:
    """features [T, taps * H] and last_hidden [T, H] as one tensor [T, H] a state."""
    parts = features.chunk(len(layers), dim=-1) if layers else ()
    return {**dict(zip(layers, parts, strict=True)), LAST: last_hidden}


def _beside(taps: list[Tensor], last: Tensor) -> Tensor:
    """[T, taps * H]."""
    return torch.cat(taps, dim=-1) if taps else last[:, :0]


def _pack(sequences: Sequences, documents: Sequence[int], states: list[tuple[Tensor, Tensor]]) -> Batch:
    chosen = sequences.select(documents)
    features, last_hidden = (torch.cat(parts) for parts in zip(*states, strict=True))
    return Batch(chosen.ids.long(), chosen.loss_mask, chosen.offsets, features, last_hidden)
