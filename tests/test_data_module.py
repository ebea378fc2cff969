import json
from itertools import chain
from types import SimpleNamespace

import pytest
import torch

from data.batch import Batch, Sequences
from data.module import DraftDataModule, PlanLoader, epoch_batches, pack, split_batch, training_plan
from spec_decode.errors import DraftwrightError

LENGTHS = [300, 20, 90, 512, 40, 700, 60, 80, 200, 10]


class Source:
    """Feature source whose ids say which documents a batch holds."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        count = len(lengths)
        self.sequences = Sequences(torch.arange(count), torch.ones(count, dtype=torch.bool), torch.arange(count + 1))

    def batch(self, documents: list[int]) -> Batch:
        ids = torch.tensor(documents)
        offsets = torch.arange(len(documents) + 1)
        return Batch(ids, torch.ones_like(ids, dtype=torch.bool), offsets, torch.zeros(0), torch.zeros(0))

    def flush(self) -> None:
        pass


def _module(**changes) -> DraftDataModule:
    options = {"tokens_per_batch": 600, "seed": 3, "epochs": 2} | changes
    return DraftDataModule(Source(LENGTHS), Source([100, 500, 600]), **options)


def _documents(loader) -> list[list[int]]:
    return [batch.ids.tolist() for batch in loader]


def test_pack_fills_batches_first_fit() -> None:
    assert pack([5, 4, 3, 9, 1], [0, 1, 2, 3, 4], 8) == [[0, 2], [1, 4], [3]]


@pytest.mark.parametrize("count", [1, 7, 400])
def test_every_document_once_within_budget(count: int) -> None:
    lengths = [(37 * i) % 500 + 1 for i in range(count)]
    batches = epoch_batches(lengths, 1024, seed=0, epoch=0)
    assert sorted(chain(*batches)) == list(range(count))
    assert max(sum(lengths[d] for d in batch) for batch in batches) <= 1024
    if count == 400:  # nearly all of the budget is used
        assert sum(lengths) / len(batches) > 0.97 * 1024


def test_a_document_longer_than_the_budget_stands_alone() -> None:
    assert [5] in epoch_batches(LENGTHS, 600, seed=0, epoch=0)


def test_order_depends_on_seed_and_epoch_alone() -> None:
    first = epoch_batches(LENGTHS, 600, seed=1, epoch=0)
    torch.manual_seed(99)
    assert first == epoch_batches(LENGTHS, 600, seed=1, epoch=0)
    assert first != epoch_batches(LENGTHS, 600, seed=1, epoch=1)
    assert first != epoch_batches(LENGTHS, 600, seed=2, epoch=0)


def test_plan_is_the_epochs_one_after_another() -> None:
    epochs = [epoch_batches(LENGTHS, 600, 5, epoch) for epoch in range(3)]
    assert training_plan(LENGTHS, 600, 5, epochs=3) == list(chain(*epochs))
    assert training_plan(LENGTHS, 600, 5, epochs=1, max_steps=7) == list(chain(*epochs))[:7]
    assert len(training_plan(LENGTHS, 600, 5, epochs=1, max_steps=1)) == 1


def test_loader_continues_where_its_state_says() -> None:
    whole = _documents(_module().train_dataloader())
    module = _module()
    batches = iter(module.train_dataloader())
    seen = [next(batches).ids.tolist() for _ in range(4)]
    state = json.loads(json.dumps(module.state_dict()))  # plain values only
    assert state["position"] == 4
    resumed = _module()
    resumed.load_state_dict(state)
    assert seen + _documents(resumed.train_dataloader()) == whole


def test_another_plan_is_refused() -> None:
    state = _module().state_dict()
    with pytest.raises(DraftwrightError, match="written with other data, batches or seed"):
        _module(seed=4).load_state_dict(state)


def test_validation_batches_are_fixed() -> None:
    loader = _module().val_dataloader()
    assert _documents(loader) == _documents(loader) == [[0, 1], [2]]


def test_breaking_off_a_pass_leaves_the_next_whole() -> None:
    loader = PlanLoader(Source([1, 1]), [[0], [1]])
    next(iter(loader))
    assert _documents(loader) == [[0], [1]]


@pytest.mark.parametrize("name", ["tokens_per_batch", "epochs", "max_steps"])
def test_numbers_below_one_are_refused(name: str) -> None:
    with pytest.raises(DraftwrightError, match=f"^{name} must be at least 1, got 0$"):
        _module(**{name: 0})


def _shares(rank: int, processes: int, micro_batches: int) -> list[Batch]:
    module = _module()
    module.trainer = SimpleNamespace(global_rank=rank, world_size=processes, accumulate_grad_batches=micro_batches)
    module.setup("fit")
    assert len(module.train_dataloader()) == module.total_steps * micro_batches
    return list(module.train_dataloader())


def test_each_process_reads_only_its_share() -> None:
    """Of each step the processes and micro-batches read every document once, beside spare ones."""
    micro_batches = 2
    shares = [_shares(rank, 2, micro_batches) for rank in range(2)]
    for step, whole in enumerate(_documents(_module().train_dataloader())):
        parts = [batch for share in shares for batch in share[step * micro_batches :][:micro_batches]]
        assert sorted(chain(*(part.ids.tolist() for part in parts if not part.share.spare))) == sorted(whole)
        assert all(part.ids.numel() == 1 for part in parts if part.share.spare)
        assert {part.share.parts for part in parts} == {4}
        assert all(part.share.tokens.ids.tolist() == whole for part in parts)


def test_a_batch_is_split_by_tokens() -> None:
    assert split_batch([0, 1, 2, 3], [5, 9, 4, 1], 2) == [[1, 3], [0, 2]]
    assert split_batch([1], [5, 9], 3) == [[1], [], []]


def test_nothing_to_train_on_is_an_error() -> None:
    with pytest.raises(DraftwrightError, match="no conversation is left to train on"):
        DraftDataModule(Source([]), Source([1]), tokens_per_batch=8, seed=0, epochs=1)
