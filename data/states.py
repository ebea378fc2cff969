"""Target states on disk: memory-mapped safetensors shards that say themselves what they hold.

A shard holds one tensor [T, H] for each tapped layer, named by its number, and `last`: the rows of several documents
end to end. Its header names these states, the documents, the fingerprint of what the states depend on, and a checksum.
A cache is the shards of a folder, so that several processes can write into it, and one that was killed leaves what it
finished.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from spec_decode.checkpoint import write_atomically
from spec_decode.errors import DraftwrightError

SHARD_TOKENS = 32_768
LAST = "last"
FLOAT8 = torch.float8_e4m3fn

StateDtype = Literal["bfloat16", "float8", "same"]
States = dict[str, Tensor]  # the name of a state -> [T, H]


def encode(states: Mapping[str, Tensor], dtype: StateDtype) -> States:
    """States as they are stored. float8: e4m3 with a scale for each token, NAME.scale [T, 1], the largest value there
    over the largest that the format holds; same: unchanged."""
    if dtype == "same":
        return dict(states)
    if dtype == "bfloat16":
        return {name: state.to(torch.bfloat16) for name, state in states.items()}
    stored: States = {}
    for name, state in states.items():
        scale = state.float().abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / torch.finfo(FLOAT8).max
        stored |= {name: (state.float() / scale).to(FLOAT8), f"{name}.scale": scale}
    return stored


def decode(stored: Mapping[str, Tensor], name: str, dtype: torch.dtype) -> Tensor:
    """The state `name` [T, H] in `dtype`."""
    state = stored[name]
    return (state.float() * stored[f"{name}.scale"]).to(dtype) if state.dtype == FLOAT8 else state.to(dtype)


def bytes_per_token(states: int, hidden_size: int, dtype: StateDtype, target_dtype: torch.dtype) -> int:
    """What `encode` makes of one token with this many states."""
    width = {"bfloat16": 2, "float8": 1, "same": target_dtype.itemsize}[dtype]
    return states * (hidden_size * width + 4 * (dtype == "float8"))


class StateStore:
    """The shards of one folder with the states `names` of documents that have these lengths, stored as `dtype` says.

    Shards of another fingerprint or other states are ignored. What was added is on disk after `flush`, which happens by
    itself every SHARD_TOKENS tokens; one call of `add` never comes apart.
    """

    def __init__(
        self, folder: Path, fingerprint: str, lengths: list[int], names: Sequence[str], dtype: StateDtype
    ) -> None:
        self.folder, self.fingerprint, self.lengths, self.names = folder, fingerprint, lengths, list(names)
        self.dtype = dtype
        self._places: dict[int, tuple[safe_open, int]] = {}  # document -> (shard, first row)
        self._pending: dict[int, States] = {}
        self._seen: set[Path] = set()
        self.refresh()

    def __contains__(self, document: int) -> bool:
        return document in self._places or document in self._pending

    def missing(self) -> list[int]:
        """The documents whose states are not here."""
        return [document for document in range(len(self.lengths)) if document not in self]

    def refresh(self) -> None:
        """Take in the shards that other processes have written since the last time."""
        for path in sorted({*self.folder.glob("*.safetensors")} - self._seen):
            if documents := self._documents(path):
                self._place(path, documents)

    def read(self, document: int, names: Sequence[str], dtype: torch.dtype) -> list[Tensor]:
        """These states of a document, each [T, H]."""
        if document in self._pending:
            stored = self._pending[document]
        else:
            shard, row = self._places[document]
            rows, keys = slice(row, row + self.lengths[document]), set(shard.keys())
            wanted = [key for name in names for key in (name, f"{name}.scale") if key in keys]
            stored = {key: shard.get_slice(key)[rows] for key in wanted}
        return [decode(stored, name, dtype) for name in names]

    def add(self, states: Mapping[int, States]) -> None:
        """Keep the states of these documents."""
        encoded = {document: encode(of, self.dtype) for document, of in states.items()}
        self._pending |= {document: {key: state.cpu() for key, state in of.items()} for document, of in encoded.items()}
        if sum(self.lengths[document] for document in self._pending) >= SHARD_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Write what was added since the last time as a shard."""
        if not self._pending:
            return
        documents = list(self._pending)
        keys = self._pending[documents[0]]
        tensors = {key: torch.cat([self._pending[document][key] for document in documents]) for key in keys}
        header = {
            "fingerprint": self.fingerprint,
            "states": " ".join(self.names),
            "documents": json.dumps(documents),
            "checksum": checksum(tensors),
        }
        # Named by its documents: a capture that starts alike, in another process, writes the same file.
        path = self.folder / f"shard-{sha256(header['documents'].encode()).hexdigest()[:16]}.safetensors"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, lambda file: save_file(tensors, file, metadata=header))
        except (OSError, SafetensorError) as error:
            raise DraftwrightError(
                f"could not write the feature cache to {self.folder} ({error}): free space, or set cache_dir=FOLDER or "
                "features=online"
            ) from error
        self._place(path, documents)
        self._pending = {}

    def _place(self, path: Path, documents: list[int]) -> None:
        shard, row = safe_open(path, framework="pt"), 0
        for document in documents:
            self._places[document] = (shard, row)
            row += self.lengths[document]
        self._seen.add(path)

    def _documents(self, path: Path) -> list[int]:
        """The documents in a shard; a damaged one is deleted and said so, one of another cache holds none."""
        try:
            with safe_open(path, framework="pt") as shard:
                documents = _listed(shard.metadata(), self.fingerprint, self.names)
                keys = shard.keys()
                tensors = {key: shard.get_tensor(key) for key in keys} if documents else {}
                if not documents or checksum(tensors) == shard.metadata()["checksum"]:
                    return documents
            reason = "its checksum is wrong"
        except FileNotFoundError:  # another process deleted it
            return []
        except (OSError, SafetensorError) as error:
            reason = str(error)
        print(f"the feature cache shard {path} is damaged ({reason}): its conversations are captured again")
        path.unlink(missing_ok=True)
        return []


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """CRC-32 of all values, in the order of the names."""
    crc = 0
    for _, tensor in sorted(tensors.items()):
        crc = zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().data, crc)
    return f"{crc:08x}"


def claimed(folder: Path, fingerprint: str, names: Sequence[str]) -> set[int]:
    """The documents that the shards of a folder say they hold; the states themselves stay unread."""
    documents: set[int] = set()
    for path in folder.glob("*.safetensors"):
        try:
            with safe_open(path, framework="pt") as shard:
                documents |= set(_listed(shard.metadata(), fingerprint, names))
        except (OSError, SafetensorError):
            continue
    return documents


def _listed(header: Mapping[str, str] | None, fingerprint: str, names: Sequence[str]) -> list[int]:
    """The documents that the header of a shard names, none if it belongs to another cache."""
    if not header or (header.get("fingerprint"), header.get("states")) != (fingerprint, " ".join(names)):
        return []
    return list(json.loads(header["documents"]))


def check_space(folder: Path, needed: int, tokens: int) -> None:
    """Say how much a capture will write; raise DraftwrightError if the disk has less."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise DraftwrightError(
            f"the feature cache needs {needed / 1e9:.1f} GB but {folder} has {free / 1e9:.1f} GB free: lower "
            "train_tokens, use features_dtype=float8, or set cache_dir=FOLDER or features=online"
        )
    print(f"the feature cache needs {needed / 1e9:.3f} GB for {tokens:,} tokens in {folder} ({free / 1e9:.1f} GB free)")
