"""Keeping one path of a tree leaves the cache that the path alone would have made; slots hold what they were given."""

from __future__ import annotations

import pytest
import torch

from spec_decode.cache import SlotCache, TreeCache


def filled(rows: torch.Tensor, layers: int = 2) -> TreeCache:
    """A cache whose keys at position t are rows[t] and whose values are their negatives, other in each layer."""
    cache = TreeCache()
    for layer in range(layers):
        states = (rows + 100 * layer).double().view(1, 1, -1, 1).expand(1, 2, -1, 3)
        cache.update(states, -states, layer)
    return cache


def keys(cache: TreeCache, layer: int) -> list[int]:
    return cache.layers[layer].keys[0, 1, :, 2].int().tolist()


@pytest.mark.parametrize(
    ("path", "kept"),
    [
        ([0], [0, 1, 2, 3]),
        ([0, 1, 2], [0, 1, 2, 3, 4, 5]),
        ([0, 2, 4], [0, 1, 2, 3, 5, 7]),
        ([0, 1, 4], [0, 1, 2, 3, 4, 7]),
        ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7]),
        ([], [0, 1, 2]),
    ],
)
def test_keeps_the_prefix_and_the_path_in_every_layer(path: list[int], kept: list[int]) -> None:
    cache = filled(torch.arange(8))
    cache.keep([3], 3, [torch.tensor(path, dtype=torch.int64)])
    assert cache.length() == len(kept)
    assert keys(cache, 0) == kept
    assert keys(cache, 1) == [100 + k for k in kept]
    assert torch.equal(cache.layers[1].values, -cache.layers[1].keys)


def test_grows_on_after_keeping() -> None:
    cache = filled(torch.arange(6))
    cache.keep([2], 2, [torch.tensor([0, 3])])
    new = torch.full((1, 2, 1, 3), 9.0, dtype=torch.float64)
    cache.update(new, -new, 0)
    assert keys(cache, 0) == [0, 1, 2, 5, 9]


def test_length_of_an_empty_cache() -> None:
    assert TreeCache().length() == 0


def test_rows_of_a_batch_keep_their_own_lengths_and_paths() -> None:
    cache = TreeCache()
    states = torch.stack([torch.arange(8), 10 + torch.arange(8), 20 + torch.arange(8)]).double()
    cache.update(states.view(3, 1, 8, 1), -states.view(3, 1, 8, 1), 0)
    # rows hold 5, 3 and 4 positions, then each ran a tree of three nodes
    cache.keep([5, 3, 4], 5, [torch.tensor([0, 2]), torch.tensor([0, 1, 2]), torch.tensor([0])])
    kept = cache.layers[0].keys[:, 0, :, 0].int().tolist()
    assert kept[0] == [0, 1, 2, 3, 4, 5, 7]
    assert kept[1][:6] == [10, 11, 12, 15, 16, 17]
    assert kept[2][:5] == [20, 21, 22, 23, 25]
    assert cache.length() == 7
    cache.select([2, 0])
    assert cache.layers[0].keys[:, 0, :3, 0].int().tolist() == [[20, 21, 22], [0, 1, 2]]
    assert torch.equal(cache.layers[0].values, -cache.layers[0].keys)


def run(cache: SlotCache, first: int, tokens: list[list[int]]) -> list[list[int]]:
    """A pass of one layer whose keys are the tokens; what each row sees of them at its last column."""
    ids, _, seen = cache.append(first, [torch.tensor(few) for few in tokens])
    states = ids[:, None, :, None].double().expand(-1, 2, -1, 3)
    keys, values = cache.update(states, -states, 0)
    assert torch.equal(keys, -values)
    return [keys[row, 1, seen[row, len(few) - 1], 2].int().tolist() for row, few in enumerate(tokens)]


def test_slots_advance_at_their_own_length() -> None:
    cache = SlotCache(3, 9)
    assert run(cache, 0, [[1, 2, 3], [4]]) == [[1, 2, 3], [4]]
    assert run(cache, 1, [[5, 6], [7, 8, 9, 10]]) == [[4, 5, 6], [7, 8, 9, 10]]
    assert run(cache, 0, [[11], [12], [13]]) == [[1, 2, 3, 11], [4, 5, 6, 12], [7, 8, 9, 10, 13]]
    cache.swap(0, 2)
    assert cache.lengths.tolist() == [5, 4, 4]
    assert run(cache, 0, [[14], [15], [16]]) == [[7, 8, 9, 10, 13, 14], [4, 5, 6, 12, 15], [1, 2, 3, 11, 16]]


def test_padding_is_not_written_and_its_positions_lie_within_the_pass() -> None:
    cache = SlotCache(2, 6)
    run(cache, 0, [[1, 2, 3, 4]])
    ids, positions, seen = cache.append(0, [torch.tensor([5]), torch.tensor([6, 7, 8])])
    assert ids.tolist() == [[5, 0, 0], [6, 7, 8]]
    assert positions.tolist() == [[4, 4, 4], [0, 1, 2]]
    assert seen.int().tolist() == [[[1, 1, 1, 1, 1]] * 3, [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]]
    assert cache.length() == 2  # 5 positions, 3 of them columns of the pass
    states = ids[:, None, :, None].double().expand(-1, 2, -1, 3)
    keys, _ = cache.update(states, -states, 0)
    assert keys[:, 0, :, 0].int().tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 0, 0]]


def test_a_prompt_starts_with_the_most_that_a_slot_holds_of_it() -> None:
    cache = SlotCache(4, 8)
    run(cache, 0, [[1, 2, 3, 4], [1, 2, 5]])
    prompts = [[1, 2, 5, 6], [7, 8], [1, 2, 3, 4]]
    cache.start(1, [torch.tensor(prompt) for prompt in prompts])  # reads slot 1 before it is overwritten
    assert cache.lengths.tolist() == [4, 3, 0, 3]  # a whole prompt leaves its last token to be run
    assert run(cache, 1, [[6], [7, 8], [4]]) == prompts
