"""Which row predicts which token, on a hand-written example."""

from __future__ import annotations

import torch

from data.alignment import align


def test_by_hand():
    # Document 0: x0..x4 with x3, x4 supervised; document 1: x5..x7 with x6, x7 supervised.
    mask = torch.tensor([0, 0, 0, 1, 1, 0, 1, 1], dtype=torch.bool)
    found = align(mask, torch.tensor([0, 5, 8]), steps=2)
    # x6 has only one token before it in its document, so no draft row predicts it.
    assert found.targets.tolist() == [3, 4, 7]
    assert found.rows.tolist() == [0, 1, 2, 5]
    assert found.valid.tolist() == [[True, True, True], [True, True, False]]
    assert found.rows[found.index[0]].tolist() == [1, 2, 5]
    assert found.rows[found.index[1, :2]].tolist() == [0, 1]


def test_the_first_drafted_position_after_a_prompt_is_trained():
    # Prompt x0..x3, answer x4..x6: when x4 is known, row 3 drafts x5.
    mask = torch.tensor([0, 0, 0, 0, 1, 1, 1], dtype=torch.bool)
    found = align(mask, torch.tensor([0, 7]), steps=1)
    assert 5 in found.targets.tolist()
    assert found.rows[found.index[0, found.targets == 5]].tolist() == [3]
    assert found.rows.max() == 4  # the row after which the last supervised token comes, and none beyond


def test_nothing_supervised():
    found = align(torch.zeros(4, dtype=torch.bool), torch.tensor([0, 4]), steps=3)
    assert found.targets.numel() == found.rows.numel() == 0
