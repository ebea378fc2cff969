"""The speculative loop and, beside it on the same target code, the plain loop that it is compared with.

    prefill -> draft.start -> [propose -> one target forward over the tree -> verify -> cache.keep -> commit]*

Invariant of both loops: the cache holds every committed token but the last, so the next forward starts with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from spec_decode.acceptance import tau
from spec_decode.drafter import Drafter
from spec_decode.drafters.eagle3 import Eagle3Draft
from spec_decode.errors import DraftwrightError
from spec_decode.sampling import Probabilities, Sampling, choose
from spec_decode.target import Target, TargetOutput
from spec_decode.tree import StaticTree, Tree, TreePlan
from spec_decode.verify import Verdict, verify, verify_greedy

GREEDY = Sampling()


@dataclass(frozen=True)
class DecodeResult:
    """tokens: the new ones, an end-of-turn token included.

    For each round after the prefill, which yields the first token: accepted, the drafts accepted without the round's
    last token (the bonus token, or a drafted end-of-turn), not cut at max_new_tokens; offered, the depth of the tree
    (up to a drafted end-of-turn). prefill_seconds includes the draft's start.
    """

    tokens: list[int]
    accepted: list[int]
    offered: list[int]
    prefill_seconds: float
    draft_seconds: float
    verify_seconds: float

    @property
    def rounds(self) -> int:
        return len(self.accepted)

    @property
    def tau(self) -> float:
        """Acceptance length, see `spec_decode.acceptance.tau`."""
        return tau(self.accepted)


@torch.inference_mode()
def plain_decode(
    target: Target,
    input_ids: Sequence[int] | Tensor,
    *,
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    eos_token_ids: Iterable[int] | None = None,
    generator: torch.Generator | None = None,
) -> DecodeResult:
    """Autoregressive decoding, one token for each forward; arguments and errors as in `eagle3_decode`."""
    ids = _prompt(target, input_ids, max_new_tokens)
    stop = _stop_ids(target, eos_token_ids)
    began = perf_counter()
    cache = target.new_cache()
    output = target.forward(ids[None], cache=cache, logits=slice(-1, None))
    tokens = [_choose_last(output, sampling, generator)]
    prefilled = perf_counter()
    limit = min(max_new_tokens, target.spec.max_positions - ids.numel() + 1)
    while len(tokens) < limit and tokens[-1] not in stop:
        output = target.forward(ids.new_tensor([[tokens[-1]]]), cache=cache, logits=slice(-1, None))
        tokens.append(_choose_last(output, sampling, generator))
    rounds = len(tokens) - 1
    return DecodeResult(tokens, [0] * rounds, [0] * rounds, prefilled - began, 0.0, perf_counter() - prefilled)


@torch.inference_mode()
def speculative_decode(
    target: Target,
    draft: Drafter,
    input_ids: Sequence[int] | Tensor,
    *,
    tree: TreePlan,
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    eos_token_ids: Iterable[int] | None = None,
    generator: torch.Generator | None = None,
) -> DecodeResult:
    """Decode with any drafter; arguments and errors as in `eagle3_decode`. The drafter is bound to `target`."""
    ids = _prompt(target, input_ids, max_new_tokens)
    stop = _stop_ids(target, eos_token_ids)
    draft.bind(target)
    accepted: list[int] = []
    offered: list[int] = []
    drafting = verifying = 0.0
    began = perf_counter()
    cache = target.new_cache()
    wanted: dict[str, Any] = {"cache": cache, "taps": draft.taps, "last_hidden": draft.needs_last_hidden}
    output = target.forward(ids[None], logits=slice(-1, None), **wanted)
    tokens = [_choose_last(output, sampling, generator)]
    state = draft.start(output, ids)
    clock = perf_counter()
    prefill = clock - began
    while len(tokens) < max_new_tokens and tokens[-1] not in stop:
        past = cache.length()
        room = target.spec.max_positions - past - 1  # for the tree below its root
        if room < 0:
            break
        proposed = draft.propose(state, tokens[-1], _cut(tree, room), generator) if room else _root_only(tokens[-1])
        drafted = perf_counter()
        depth = proposed.depth()
        output = target.forward(
            proposed.tokens[None].to(ids.device),
            positions=(past + depth)[None].to(ids.device),
            mask=proposed.ancestor_mask().to(ids.device) if len(proposed) > 1 else None,
            logits=slice(None),
            **wanted,
        )
        verdict = _verify(proposed, output, sampling, generator)
        cache.keep(past, verdict.path)
        new = proposed.tokens[verdict.path[1:]].tolist()
        ends = [i for i, token in enumerate(new) if token in stop]
        tokens += new[: ends[0] + 1] if ends else [*new, verdict.bonus]
        # A drafted end-of-turn takes the bonus token's place: every round yields accepted + 1 tokens.
        accepted.append(ends[0] if ends else len(new))
        offered.append(ends[0] if ends else int(depth.max()))
        verified = perf_counter()
        state = draft.commit(state, proposed, verdict.path, output)
        drafting += drafted - clock
        verifying += verified - drafted
        clock = verified
    return DecodeResult(tokens[:max_new_tokens], accepted, offered, prefill, drafting, verifying)


def eagle3_decode(
    target: Target,
    draft: Eagle3Draft,
    input_ids: Sequence[int] | Tensor,
    *,
    tree: TreePlan | Sequence[int],
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    eos_token_ids: Iterable[int] | None = None,
    generator: torch.Generator | None = None,
) -> DecodeResult:
    """Decode with an EAGLE-3 draft; the output has the distribution of plain decoding, at temperature 0 its tokens.

    input_ids: a list, or int64 [T] or [1, T]; tree: a plan, or a list of branching factors for a static tree;
    eos_token_ids: None takes the target's, () none. Stops at end-of-turn, at max_new_tokens exactly, or when the
    target's context is full. Raises TypeError and ValueError that name the argument.
    """
    if not (hasattr(target, "spec") and callable(getattr(target, "forward", None))):
        raise _type_error("target", target, "a target such as HFTarget, with `spec` and `forward`")
    if not isinstance(draft, Eagle3Draft):
        raise _type_error("draft", draft, "an Eagle3Draft")
    if isinstance(tree, list | tuple) and all(type(width) is int for width in tree):
        tree = StaticTree(tuple(tree))
    if not isinstance(tree, TreePlan):
        raise _type_error("tree", tree, "a DynamicTree, a StaticTree or a list of ints")
    if not isinstance(sampling, Sampling):
        raise _type_error("sampling", sampling, "a Sampling")
    return speculative_decode(
        target,
        draft,
        input_ids,
        tree=tree,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        eos_token_ids=eos_token_ids,
        generator=generator,
    )


def _prompt(target: Target, input_ids: Sequence[int] | Tensor, max_new_tokens: int) -> Tensor:
    """The prompt as int64 [P] on the target's device, with both arguments checked."""
    if isinstance(input_ids, Tensor):
        if input_ids.dtype != torch.int64 or not (
            input_ids.dim() == 1 or (input_ids.dim() == 2 and len(input_ids) == 1)
        ):
            shape = f"{input_ids.dtype} tensor of shape {list(input_ids.shape)}"
            raise TypeError(f"input_ids must be a list of ints or an int64 tensor [T] or [1, T], not a {shape}")
        ids = input_ids.flatten()
    elif isinstance(input_ids, list | tuple) and all(type(token) is int for token in input_ids):
        ids = torch.tensor(input_ids, dtype=torch.int64)
    else:
        raise _type_error("input_ids", input_ids, "a list of ints or an int64 tensor [T] or [1, T]")
    if type(max_new_tokens) is not int:
        raise _type_error("max_new_tokens", max_new_tokens, "an int")
    if max_new_tokens < 1:
        raise DraftwrightError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    if not 1 <= ids.numel() <= target.spec.max_positions:
        raise DraftwrightError(
            f"input_ids must hold 1 to {target.spec.max_positions} tokens for this target, got {ids.numel()}"
        )
    if ids.min() < 0 or ids.max() >= target.spec.vocab_size:
        raise DraftwrightError(
            f"input_ids must lie in 0 to {target.spec.vocab_size - 1}, the target's vocabulary, got {int(ids.min())} "
            f"to {int(ids.max())}: the prompt was made with another tokenizer"
        )
    return ids.to(target.device)


def _stop_ids(target: Target, eos_token_ids: Iterable[int] | None) -> frozenset[int]:
    if not isinstance(eos_token_ids, Iterable | None):
        raise _type_error("eos_token_ids", eos_token_ids, "a list of ints or None")
    return frozenset(target.spec.eos_token_ids if eos_token_ids is None else eos_token_ids)


def _type_error(name: str, given: object, wanted: str) -> TypeError:
    return TypeError(f"{name} must be {wanted}, not {type(given).__name__}")


def _cut(plan: TreePlan, depth: int) -> TreePlan:
    """The same plan with at most `depth` levels."""
    if isinstance(plan, StaticTree):
        return StaticTree(plan.branching[:depth])
    return dataclasses.replace(plan, depth=min(plan.depth, depth))


def _root_only(root: int) -> Tree:
    return Tree(torch.tensor([root]), torch.tensor([-1]))


def _choose_last(output: TargetOutput, sampling: Sampling, generator: torch.Generator | None) -> int:
    assert output.logits is not None
    return choose(output.logits[0, -1], sampling, generator)


def _verify(tree: Tree, output: TargetOutput, sampling: Sampling, generator: torch.Generator | None) -> Verdict:
    assert output.logits is not None
    if sampling.greedy:
        return verify_greedy(tree, output.logits[0].argmax(dim=-1))
    return verify(tree, Probabilities(output.logits[0], sampling), generator)
