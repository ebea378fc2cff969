"""Many prompts in slots of one cache give what each gives alone."""

from __future__ import annotations

import pytest
import torch

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
    alone = {
        key: answer(target, [prompt] * (key + 1), 1, sampling)[key].tokens for key, prompt in enumerate(prompts)
    }
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
