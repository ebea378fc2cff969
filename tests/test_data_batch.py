"""Packed sequences."""

from __future__ import annotations

import pytest
import torch

from data.batch import Sequences

SEQUENCES = Sequences(torch.arange(9, dtype=torch.int32), torch.arange(9) % 2 == 0, torch.tensor([0, 4, 6, 9]))


def test_documents():
    assert [ids.tolist() for ids, _ in SEQUENCES] == [[0, 1, 2, 3], [4, 5], [6, 7, 8]]
    with pytest.raises(IndexError):
        SEQUENCES[3]


@pytest.mark.parametrize(("tokens", "documents"), [(1, 1), (4, 1), (5, 2), (6, 2), (7, 3), (100, 3)])
def test_prefix_holds_whole_documents(tokens, documents):
    prefix = SEQUENCES.prefix(tokens)
    assert len(prefix) == documents
    assert prefix.ids.tolist() == list(range(int(SEQUENCES.offsets[documents])))
    assert prefix.loss_mask.tolist() == [i % 2 == 0 for i in prefix.ids.tolist()]
