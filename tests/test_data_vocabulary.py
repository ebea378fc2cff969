import pytest
import torch

from data.batch import Sequences
from data.vocabulary import build_draft_vocabulary, structure_tokens
from spec_decode.errors import DraftwrightError


def sequences(ids, mask=None):
    mask = [True] * len(ids) if mask is None else mask
    return Sequences(torch.tensor(ids, dtype=torch.int32), torch.tensor(mask), torch.tensor([0, len(ids)]))


def test_most_frequent_supervised_tokens_and_forced_ones():
    data = sequences([7, 7, 7, 5, 5, 9, 3, 3, 3, 3], [True] * 6 + [False] * 4)
    vocabulary = build_draft_vocabulary(data, 3, 12, forced=[1])
    assert vocabulary.ids.tolist() == [1, 5, 7]
    assert vocabulary.d2t.tolist() == [1, 4, 5]
    assert vocabulary.d2t.dtype == torch.int64
    assert vocabulary.t2d.tolist() == [i in (1, 5, 7) for i in range(12)]
    assert vocabulary.coverage(data) == pytest.approx(5 / 6)


def test_ties_go_to_the_lower_id_and_unused_ids_fill_up():
    assert build_draft_vocabulary(sequences([8, 6, 4, 2]), 2, 10).ids.tolist() == [2, 4]
    assert build_draft_vocabulary(sequences([8, 6]), 5, 10).ids.tolist() == [0, 1, 2, 6, 8]
    assert build_draft_vocabulary(sequences([70_000]), 5_000, 80_000).ids.tolist() == [*range(4_999), 70_000]
    assert build_draft_vocabulary(sequences([8]), 10, 10).d2t.tolist() == [0] * 10


def test_no_size_takes_the_whole_vocabulary():
    assert build_draft_vocabulary(sequences([8]), None, 10, forced=[1]).ids.tolist() == list(range(10))
    with pytest.raises(DraftwrightError, match="belongs to another target"):
        build_draft_vocabulary(sequences([10]), None, 10)


def test_no_supervised_token_covers_nothing():
    data = sequences([1, 2], [False, False])
    assert build_draft_vocabulary(data, 2, 4).coverage(data) == 0.0


@pytest.mark.parametrize(("size", "forced"), [(0, []), (11, []), (2, [1, 2, 3])])
def test_impossible_sizes(size, forced):
    with pytest.raises(DraftwrightError, match=f"a draft vocabulary of {size} tokens is not possible"):
        build_draft_vocabulary(sequences([1]), size, 10, forced)


def test_ids_outside_the_target():
    with pytest.raises(DraftwrightError, match="belongs to another target"):
        build_draft_vocabulary(sequences([10]), 2, 10)


def test_structure_tokens(tokenizer):
    assert structure_tokens(tokenizer, []) == [1, 2]
    assert structure_tokens(tokenizer, [0]) == [0, 1, 2]
    tokenizer.chat_template = None
    assert structure_tokens(tokenizer, []) == [2]
