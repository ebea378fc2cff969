"""Many prompts in slots of one cache give what each gives alone."""

from __future__ import annotations

import pytest
import torch

from spec_decode import generate as generation
from spec_decode.cache import SlotCache
from spec_decode.decode import plain_decode
from spec_decode.errors import DraftwrightError
from spec_decode.generate import Request, generate
from spec_decode.sampling import GREEDY, Sampling
from spec_decode.target_hf import HFTarget


@pytest.fixture
def target(tiny_llama):
    return HFTarget(tiny_llama(eos_token_id=7).double(), "tiny")


def answer(target, prompts, slots, sampling=GREEDY, room=40, max_new_tokens=12):
    waiting = [Request(i, torch.tensor(prompt), seed=i) for i, prompt in enumerate(prompts)]
    found = generate(
        target,
        lambda: waiting.pop(0) if waiting else None,
        slots=slots,
        room=room,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
    )
    return {one.key: one for one in found}


def make_prompts(count):
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 12, (count,), generator=generator).tolist()
    return [torch.randint(8, 40, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("slots", [1, 2, 5, 16])
def test_every_answer_is_that_of_plain_decoding(target, slots):
    prompts = make_prompts(9)
    found = answer(target, prompts, slots)
    assert sorted(found) == list(range(9))
    for key, prompt in enumerate(prompts):
        assert found[key].tokens == plain_decode(target, prompt, max_new_tokens=12).tokens


def test_sampled_answers_do_not_depend_on_their_neighbours(target):
    prompts = make_prompts(6)
    sampling = Sampling(temperature=1.0, top_k=9, top_p=0.9)
    alone = {key: answer(target, [prompt] * (key + 1), 1, sampling)[key].tokens for key, prompt in enumerate(prompts)}
    together = answer(target, prompts, 4, sampling)
    assert {key: one.tokens for key, one in together.items()} == alone
    assert len({tuple(tokens) for tokens in alone.values()}) > 1


def test_an_answer_ends_at_the_limit_of_its_room(target):
    found = answer(target, [[9] * 30], 2, room=33, max_new_tokens=50)
    assert len(found[0].tokens) == 3
    assert not found[0].finished


def test_a_target_that_ends_its_turn_finishes(target):
    prompt = [9, 10, 11]
    first = plain_decode(target, prompt, max_new_tokens=1).tokens[0]
    target.spec = type(target.spec)(**{**target.spec.__dict__, "eos_token_ids": (first,)})
    found = answer(target, [prompt], 2)
    assert found[0].finished
    assert found[0].tokens == [first]


def test_a_prompt_without_room_is_refused(target):
    with pytest.raises(DraftwrightError, match="a prompt of 40 tokens leaves no room in 40 for an answer"):
        answer(target, [[9] * 40], 2, room=40)


def test_no_prefill_is_larger_than_allowed(target, monkeypatch):
    """A long prompt behind short ones waits for a pass of its own."""
    monkeypatch.setattr(generation, "PREFILL_TOKENS", 24)
    prompts = [[9, 10]] * 5 + [[11] * 30] + [[12] * 3] * 9 + [[13] * 20, [14] * 20]
    sizes, start = [], SlotCache.start

    def watched(cache, first, prompts):
        sizes.append([prompt.numel() for prompt in prompts])
        start(cache, first, prompts)

    monkeypatch.setattr(SlotCache, "start", watched)
    found = answer(target, prompts, slots=16)
    assert sizes == [[2], [2] * 4, [30], [3] * 8, [3], [20], [20]]
    for key, prompt in enumerate(prompts):
        assert found[key].tokens == plain_decode(target, prompt, max_new_tokens=min(12, 40 - len(prompt))).tokens


def watch_passes(target, monkeypatch):
    """Rows and columns of each pass that the target runs from now on."""
    shapes, forward = [], target.forward

    def watched(ids, **more):
        shapes.append(tuple(ids.shape))
        return forward(ids, **more)

    monkeypatch.setattr(target, "forward", watched)
    return shapes


def test_a_prompt_starts_from_what_a_slot_holds(target, monkeypatch):
    """Three prompts begin with the same 8 tokens; the last one is the first chat's second turn, with the longest."""
    prompts = [[*range(20, 28), 9, 10], [*range(20, 28), 11], [*range(20, 28), 12, 13, 14]]
    shapes = watch_passes(target, monkeypatch)
    waiting = [Request(key, torch.tensor(prompt), seed=0) for key, prompt in enumerate(prompts)]
    found: dict[int, Request] = {}
    for one in generate(
        target, lambda: waiting.pop(0) if waiting else None, slots=3, room=60, max_new_tokens=6, sampling=GREEDY
    ):
        found[one.key] = one
        if one.key == 0 and len(prompts) == 3:
            prompts.append([*prompts[0], *one.tokens, 30, 31])
            waiting.append(Request(3, torch.tensor(prompts[3]), seed=0))
    # the first alone; 8 of 9 and of 11 tokens are held; 10 + 5 of the next turn's 18, as the last answer was not run
    assert shapes == [(1, 10), (2, 3), *[(3, 1)] * 5, (1, 3), *[(1, 1)] * 5]
    monkeypatch.undo()
    for key, prompt in enumerate(prompts):
        assert found[key].tokens == plain_decode(target, prompt, max_new_tokens=6).tokens


def test_a_pass_runs_the_slots_in_use_alone(target, monkeypatch):
    shapes = watch_passes(target, monkeypatch)
    answer(target, [[9] * 36, [10] * 38, [11] * 33, [12] * 37], slots=8, room=40)  # 4, 2, 7 and 3 tokens of room
    assert [rows for rows, columns in shapes if columns == 1] == [4, 3, 2, 1, 1, 1]


def test_a_slot_without_a_request_takes_no_room(target):
    """Slots stay empty for more passes than there is room, while requests come one after the other."""
    prompts = make_prompts(7)
    waiting = [Request(key, torch.tensor(prompt), seed=0) for key, prompt in enumerate(prompts)]
    asked: list[int] = []
    found: list[Request] = []

    def take():
        if waiting and len(asked) <= len(found) + 1:  # two at first
            asked.append(waiting[0].key)
            return waiting.pop(0)
        return None

    for one in generate(target, take, slots=3, room=20, max_new_tokens=8, sampling=GREEDY):
        found.append(one)
        assert one.tokens == plain_decode(target, prompts[one.key], max_new_tokens=len(one.tokens)).tokens
    assert sorted(one.key for one in found) == list(range(7))
    assert sum(len(one.tokens) for one in found) > 40


def test_a_slot_whose_answer_ended_with_the_prefill_takes_no_room(target):
    found = answer(target, [[9] * 19, [9, 10]], 2, room=20)
    assert [len(found[key].tokens) for key in (0, 1)] == [1, 12]
