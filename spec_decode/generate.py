"""Plain decoding of many prompts at once: slots of one static key/value cache, refilled as answers end.

    requests -> prefill of a few, padded -> their slots -> [one pass over all slots -> one token each]* -> answers

Each slot advances at its own length, so no answer waits for another, and no cache is ever copied or grown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from spec_decode.cache import SlotCache, TreeCache
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
    running: dict[int, Request] = {}
    held: list[Request] = []
    stop = frozenset(target.spec.eos_token_ids)

    def ended(request: Request, token: int) -> bool:
        request.tokens.append(token)
        request.finished = token in stop
        full = request.prompt.numel() + len(request.tokens) >= room
        return request.finished or full or len(request.tokens) >= max_new_tokens

    exhausted = False
    while True:
        free = [slot for slot in range(slots) if slot not in running]
        while not exhausted and (not running or len(free) * REFILL >= slots) and free:
            batch = _take(take, held, len(free), room)
            exhausted = not batch
            if batch:
                tokens = _prefill(target, cache, free[: len(batch)], batch, sampling)
                for slot, request, token in zip(free, batch, tokens, strict=False):
                    if ended(request, token):
                        cache.free(slot)
                        yield request
                    else:
                        running[slot] = request
            free = [slot for slot in range(slots) if slot not in running]
        if not running:
            return
        tokens = _step(target, cache, running, sampling)
        for (slot, request), token in zip(list(running.items()), tokens, strict=True):
            if ended(request, token):
                del running[slot]
                cache.free(slot)
                yield request
        exhausted = False  # an answer may have brought a new request


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


def _prefill(
    target: Target, cache: SlotCache, slots: Sequence[int], batch: Sequence[Request], sampling: Sampling
) -> list[int]:
    """Run the prompts, padded on the right, into their slots; the first token of each answer."""
    lengths = [request.prompt.numel() for request in batch]
    prompts = TreeCache()
    ids = pad_sequence([request.prompt for request in batch], batch_first=True).to(target.device)
    output = target.forward(ids, cache=prompts, last_hidden=True)
    assert output.last_hidden is not None
    cache.fill(slots, prompts, lengths)
    last = output.last_hidden[torch.arange(len(batch)), torch.tensor(lengths) - 1]
    return draw(target.head(last), [request.generator for request in batch], sampling)


def _step(target: Target, cache: SlotCache, running: dict[int, Request], sampling: Sampling) -> list[int]:
    """One pass over all slots; the next token of each running one."""
    slots = list(running)
    ids = torch.zeros(len(cache.lengths), 1, dtype=torch.int64)
    ids[slots, 0] = torch.tensor([running[slot].tokens[-1] for slot in slots])
    seen = torch.arange(cache.length() + 1) <= cache.lengths[:, None]
    output = target.forward(
        ids.to(target.device),
        cache=cache,
        positions=cache.lengths[:, None].to(target.device),
        mask=seen[:, None].to(target.device),
        last_hidden=True,
    )
    cache.advance()
    assert output.last_hidden is not None
    hidden = output.last_hidden[torch.tensor(slots), 0]
    return draw(target.head(hidden), [running[slot].generator for slot in slots], sampling)


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
