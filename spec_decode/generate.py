"""Plain decoding of many prompts at once: slots of one static key/value cache, refilled as answers end.

    requests -> what no slot holds of their prompts, a few a pass -> [one pass over all -> one token each]* -> answers

Each slot advances at its own length, so no answer waits for another. Those in use stand beside each other, so no pass
computes an empty one. Prompts start from what slots hold: the system prompt of all, or the earlier turns of the chat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from spec_decode.cache import SlotCache
from spec_decode.errors import DraftwrightError
from spec_decode.sampling import Sampling, probabilities
from spec_decode.target import Target

PREFILL_TOKENS = 2_048  # in one pass, padding included; a longer prompt runs alone
REFILL = 8  # prompts are prefilled once this share (1/REFILL) of the slots is free


@dataclass
class Request:
    """One prompt [P] to answer; `key` is the caller's. Filled in: the answer's tokens, and whether the target ended
    it itself."""

    key: int
    prompt: Tensor
    seed: int
    tokens: list[int] = field(default_factory=list)
    finished: bool = False
    generator: torch.Generator | None = None


@torch.inference_mode()
def generate(
    target: Target,
    take: Callable[[], Request | None],
    *,
    slots: int,
    room: int,
    max_new_tokens: int,
    sampling: Sampling,
) -> Iterator[Request]:
    """Answer what `take` gives until it gives None and nothing is left to answer; answers come as they end.

    slots: prompts decoded at once; room: positions of the longest prompt and answer together. A request samples from a
    generator of its own, so its answer doesn't depend on what runs beside it, up to rounding. The end-of-turn token is
    part of the answer. Raises DraftwrightError for a prompt that leaves no room for an answer.
    """
    cache = SlotCache(slots, room)
    running: list[Request] = []  # request i is in slot i
    held: list[Request] = []
    stop = frozenset(target.spec.eos_token_ids)

    def advance(first: int) -> Iterator[Request]:
        """Draw a token for every request from slot `first` on; give those that end, whose slots the last ones take."""
        tokens = _advance(target, cache, first, running[first:], sampling)
        for slot, token in reversed(list(enumerate(tokens, first))):
            request = running[slot]
            request.tokens.append(token)
            request.finished = token in stop
            full = request.prompt.numel() + len(request.tokens) >= room
            if request.finished or full or len(request.tokens) >= max_new_tokens:
                last = running.pop()
                cache.swap(slot, len(running))
                if last is not request:
                    running[slot] = last
                yield request

    while True:
        if not running or (slots - len(running)) * REFILL >= slots:
            # The first prompt runs alone, because the others start from what they share with it.
            while batch := _take(take, held, slots - len(running) if cache.lengths.any() else 1, room):
                first = len(running)
                cache.start(first, [request.prompt for request in batch])
                running += batch
                yield from advance(first)
        if not running:
            return
        yield from advance(0)


def _take(take: Callable[[], Request | None], held: list[Request], count: int, room: int) -> list[Request]:
    """At most `count` requests for one prefill, at least one if there are any; one that is too long for the others
    is held back for the next."""
    batch: list[Request] = []
    longest = 0
    while len(batch) < count and (request := held.pop() if held else take()) is not None:
        if request.prompt.numel() >= room:
            raise DraftwrightError(
                f"a prompt of {request.prompt.numel()} tokens leaves no room in {room} for an answer"
            )
        longest = max(longest, request.prompt.numel())
        if batch and (len(batch) + 1) * longest > PREFILL_TOKENS:
            held.append(request)
            break
        request.generator = torch.Generator().manual_seed(request.seed)
        batch.append(request)
    return batch


def _advance(
    target: Target, cache: SlotCache, first: int, requests: Sequence[Request], sampling: Sampling
) -> list[int]:
    """Run what the slots from `first` on lack of their requests, in one pass; the next token of each."""
    lengths = cache.lengths[first:].tolist()
    missing = [_missing(request, length) for request, length in zip(requests, lengths, strict=False)]
    ids, positions, seen = (of.to(target.device) for of in cache.append(first, missing))
    output = target.forward(ids, cache=cache, positions=positions, mask=seen, last_hidden=True)
    assert output.last_hidden is not None
    last = output.last_hidden[torch.arange(len(missing)), torch.tensor([few.numel() for few in missing]) - 1]
    return draw(target.head(last), [request.generator for request in requests], sampling)


def _missing(request: Request, length: int) -> Tensor:
    """What a cache of `length` positions lacks of a request: the rest of its prompt, or the token drawn last."""
    return torch.tensor(request.tokens[-1:]) if request.tokens else request.prompt[length:]


def draw(logits: Tensor, generators: Sequence[torch.Generator | None], sampling: Sampling) -> list[int]:
    """One token for each row of logits [B, V]. With top-k only k candidates are sorted and drawn from."""
    if sampling.greedy:
        return logits.argmax(dim=-1).tolist()
    ids = None
    if 0 < sampling.top_k < logits.shape[-1]:
        logits, ids = logits.topk(sampling.top_k, dim=-1)
        sampling = replace(sampling, top_k=0)
    p = probabilities(logits, sampling).cpu()
    rows = [torch.multinomial(row, 1, generator=generator) for row, generator in zip(p, generators, strict=True)]
    drawn = torch.stack(rows).to(logits.device)
    return (drawn if ids is None else ids.gather(-1, drawn))[:, 0].tolist()
