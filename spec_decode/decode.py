"""Decoding: speculative with any drafter, plain without one, for one prompt or a batch; `spec_decode.rounds` has the
steps of the loop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from spec_decode.acceptance import tau
from spec_decode.drafter import Drafter
from spec_decode.drafters.eagle3 import Eagle3Draft
from spec_decode.drafters.leviathan import LanguageModelDraft
from spec_decode.errors import DraftwrightError, check_positive, check_type, type_error
from spec_decode.lossy import LossyTypicalAcceptance
from spec_decode.rounds import Rounds, Running
from spec_decode.sampling import GREEDY, Sampling
from spec_decode.target import Target, check_target
from spec_decode.tree import DynamicTree, Ranks, SparseTree, StaticTree, TreePlan, chain
from spec_decode.tree_file import read_tree

Prompt = Sequence[int] | Tensor


@dataclass(frozen=True)
class DecodeResult:
    """tokens: the new ones, an end-of-turn token included.

    For each round after the prefill, which yields the first token: accepted, the drafts accepted without the round's
    last token (the bonus token, or a drafted end-of-turn), not cut at max_new_tokens; offered, the depth of the tree
    (up to a drafted end-of-turn); ranks, of the accepted nodes among their siblings. prefill_seconds includes the
    draft's start (EAGLE-3 runs the prompt while it drafts the first round). The seconds of a batch are those of all
    its sequences together, while this one was among them.
    """

    tokens: list[int]
    accepted: list[int]
    offered: list[int]
    prefill_seconds: float
    draft_seconds: float
    verify_seconds: float
    ranks: list[Ranks] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        return len(self.accepted)

    @property
    def tau(self) -> float:
        """Acceptance length, see `spec_decode.acceptance.tau`."""
        return tau(self.accepted)


def plain_decode(
    target: Target,
    input_ids: Prompt,
    *,
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    eos_token_ids: Iterable[int] | None = None,
    generator: torch.Generator | None = None,
) -> DecodeResult:
    """Autoregressive decoding, one token for each forward; arguments and errors as in `batch_decode`."""
    return batch_decode(
        target,
        None,
        [input_ids],
        tree=chain(1),
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        eos_token_ids=eos_token_ids,
        generators=[generator],
    )[0]


def speculative_decode(
    target: Target,
    draft: Drafter,
    input_ids: Prompt,
    *,
    tree: TreePlan | Sequence[int] | str | Path,
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    eos_token_ids: Iterable[int] | None = None,
    generator: torch.Generator | None = None,
    lossy: LossyTypicalAcceptance | None = None,
) -> DecodeResult:
    """Decode one prompt with any drafter; arguments and errors as in `batch_decode`."""
    check_type("draft", draft, Drafter, "a Drafter")
    return batch_decode(
        target,
        draft,
        [input_ids],
        tree=tree,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        eos_token_ids=eos_token_ids,
        generators=[generator],
        lossy=lossy,
    )[0]


def eagle3_decode(
    target: Target,
    draft: Eagle3Draft,
    input_ids: Prompt,
    *,
    tree: TreePlan | Sequence[int] | str | Path,
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    eos_token_ids: Iterable[int] | None = None,
    generator: torch.Generator | None = None,
) -> DecodeResult:
    """Decode one prompt with an EAGLE-3 draft; arguments and errors as in `batch_decode`."""
    check_type("draft", draft, Eagle3Draft, "an Eagle3Draft")
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


def leviathan_decode(
    target: Target,
    draft: Target | Drafter,
    input_ids: Prompt,
    *,
    gamma: int,
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    eos_token_ids: Iterable[int] | None = None,
    generator: torch.Generator | None = None,
) -> DecodeResult:
    """The chain of Leviathan, Kalman and Matias (arXiv:2211.17192, algorithm 1): gamma drafted tokens a round,
    sampled with the request's own temperature, top-k and top-p.

    draft: a causal LM wrapped as a target, with the same vocabulary, or any drafter. Other arguments and errors as in
    `batch_decode`.
    """
    if not isinstance(draft, Drafter):
        check_target("draft", draft, "a Drafter, or ")
        draft = LanguageModelDraft(draft)
    return speculative_decode(
        target,
        draft,
        input_ids,
        tree=chain(gamma, "independent"),
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        eos_token_ids=eos_token_ids,
        generator=generator,
    )


@torch.inference_mode()
def batch_decode(
    target: Target,
    draft: Drafter | None,
    prompts: Sequence[Prompt],
    *,
    tree: TreePlan | Sequence[int] | str | Path,
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    eos_token_ids: Iterable[int] | None = None,
    generators: Sequence[torch.Generator | None] | None = None,
    lossy: LossyTypicalAcceptance | None = None,
) -> list[DecodeResult]:
    """Decode prompts of any lengths together; each result is that of its prompt alone, up to the rounding of passes of
    another width. The target runs once for all sequences of a round, the draft once for each.

    The output has the distribution of plain decoding, at temperature 0 its tokens; draft None is plain decoding.
    prompts: each a list, or int64 [T] or [1, T]; tree: a plan, a list of branching factors for a static tree, or a
    file that `python -m eval tune` wrote;
    eos_token_ids: None takes the target's, () none; generators: one on the CPU for each prompt; lossy: gives up
    exactness (`spec_decode.lossy`). A sequence stops at end-of-turn, at max_new_tokens exactly, or when the target's
    context is full. Raises TypeError and ValueError that name the argument.
    """
    check_target("target", target)
    check_type("draft", draft, Drafter | None, "a Drafter or None")
    check_type("sampling", sampling, Sampling, "a Sampling")
    check_type("prompts", prompts, list | tuple, "a list of prompts")
    if lossy is not None:
        check_type("lossy", lossy, LossyTypicalAcceptance, "a LossyTypicalAcceptance or None")
        if sampling.greedy:
            raise DraftwrightError("typical acceptance needs a temperature above 0: at 0 verification is exact anyway")
    plan = _plan(tree)
    check_positive(max_new_tokens=max_new_tokens)
    alone = len(prompts) == 1
    ids = [_prompt(target, prompt, "input_ids" if alone else f"prompts[{i}]") for i, prompt in enumerate(prompts)]
    dice = _generators(generators, len(ids))
    stop = _stop_ids(target, eos_token_ids)
    if not ids:
        return []
    if draft is not None:
        draft.to(target.device)
        draft.bind(target)
    rounds = Rounds(target, draft, plan, sampling, lossy, stop, max_new_tokens)
    sequences = rounds.prefill(ids, dice)
    active = rounds.unfinished(sequences)
    while active:
        rounds.advance(active)
        active = rounds.unfinished(active)
    return [_result(sequence, max_new_tokens) for sequence in sequences]


def _result(sequence: Running, max_new_tokens: int) -> DecodeResult:
    return DecodeResult(
        sequence.tokens[:max_new_tokens],
        sequence.accepted,
        sequence.offered,
        sequence.prefill_seconds,
        sequence.draft_seconds,
        sequence.verify_seconds,
        sequence.ranks,
    )


def _plan(tree: TreePlan | Sequence[int] | str | Path) -> TreePlan:
    if isinstance(tree, list | tuple) and all(type(width) is int for width in tree):
        return StaticTree(tuple(tree))
    if isinstance(tree, str | Path):
        return read_tree(Path(tree))
    wanted = "a DynamicTree, a StaticTree, a SparseTree, a list of ints or a tree file"
    check_type("tree", tree, DynamicTree | StaticTree | SparseTree, wanted)
    return tree  # type: ignore[return-value]


def _prompt(target: Target, input_ids: Prompt, name: str) -> Tensor:
    """The prompt as int64 [P] on the target's device, checked."""
    if isinstance(input_ids, Tensor):
        if input_ids.dtype != torch.int64 or not (
            input_ids.dim() == 1 or (input_ids.dim() == 2 and len(input_ids) == 1)
        ):
            shape = f"{input_ids.dtype} tensor of shape {list(input_ids.shape)}"
            raise TypeError(f"{name} must be a list of ints or an int64 tensor [T] or [1, T], not a {shape}")
        ids = input_ids.flatten()
    elif isinstance(input_ids, list | tuple) and all(type(token) is int for token in input_ids):
        ids = torch.tensor(input_ids, dtype=torch.int64)
    else:
        raise type_error(name, input_ids, "a list of ints or an int64 tensor [T] or [1, T]")
    if not 1 <= ids.numel() <= target.spec.max_positions:
        raise DraftwrightError(
            f"{name} must hold 1 to {target.spec.max_positions} tokens for this target, got {ids.numel()}"
        )
    if ids.min() < 0 or ids.max() >= target.spec.vocab_size:
        raise DraftwrightError(
            f"{name} must lie in 0 to {target.spec.vocab_size - 1}, the target's vocabulary, got {int(ids.min())} "
            f"to {int(ids.max())}: the prompt was made with another tokenizer"
        )
    return ids.to(target.device)


def _stop_ids(target: Target, eos_token_ids: Iterable[int] | None) -> frozenset[int]:
    if eos_token_ids is None:
        return frozenset(target.spec.eos_token_ids)
    if isinstance(eos_token_ids, str) or not isinstance(eos_token_ids, Iterable):
        raise type_error("eos_token_ids", eos_token_ids, "a list of ints or None")
    ids = eos_token_ids.tolist() if isinstance(eos_token_ids, Tensor) else list(eos_token_ids)
    for token in ids:
        if type(token) is not int:
            raise TypeError(f"eos_token_ids must hold ints, not {type(token).__name__}")
    return frozenset(ids)


def _generators(generators: Sequence[torch.Generator | None] | None, prompts: int) -> list[torch.Generator | None]:
    """One for each prompt, on the CPU."""
    if generators is None:
        return [None] * prompts
    check_type("generators", generators, list | tuple, "a list of torch.Generators or None")
    for generator in generators:
        if not isinstance(generator, torch.Generator | None):
            raise TypeError(f"generators must hold torch.Generators or None, not {type(generator).__name__}")
        if generator is not None and generator.device.type != "cpu":
            raise DraftwrightError(
                f"a generator must be on the CPU, so that a seed means the same anywhere, not on {generator.device}"
            )
    if len(generators) != prompts:
        raise DraftwrightError(f"generators must be one for each of the {prompts} prompts, got {len(generators)}")
    return list(generators)
