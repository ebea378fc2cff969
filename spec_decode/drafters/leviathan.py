"""A small causal language model as the draft (Leviathan, Kalman and Matias, ICML 2023, arXiv:2211.17192).

The draft runs on the committed tokens alone and shares nothing with the target but the vocabulary. It decodes with a
key/value cache of its own; the rows of a proposed tree leave the cache again, and what the target accepted runs
together with the next root.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spec_decode.drafter import Drafter
from spec_decode.errors import DraftwrightError
from spec_decode.growth import LevelMask, grow
from spec_decode.sampling import GREEDY, Sampling
from spec_decode.target import Cache, Target, TargetOutput, check_target
from spec_decode.tree import Tree, TreePlan


@dataclass
class LanguageModelState:
    """The draft's cache, and committed tokens int64 [M] that it does not hold yet."""

    cache: Cache
    pending: Tensor


class LanguageModelDraft(Drafter):
    """Any causal LM with the target's vocabulary, itself wrapped as a target (`HFTarget`)."""

    def __init__(self, model: Target) -> None:
        check_target("model", model)
        super().__init__()
        self.model = model

    def bind(self, target: Target) -> None:
        if self.model.spec.vocab_size != target.spec.vocab_size:
            raise DraftwrightError(
                f"draft '{self.model.spec.name}' has a vocabulary of {self.model.spec.vocab_size} tokens, but target "
                f"'{target.spec.name}' has {target.spec.vocab_size}: choose a draft with the target's tokenizer"
            )

    def start(self, output: TargetOutput, ids: Tensor) -> LanguageModelState:
        cache, ids = self.model.new_cache(), ids.to(self.model.device)
        if ids.numel() < self.model.spec.max_positions:
            self.model.forward(ids[None], cache=cache)
            ids = ids[:0]
        return LanguageModelState(cache, ids)

    def propose(
        self,
        state: LanguageModelState,
        root: int,
        plan: TreePlan,
        sampling: Sampling = GREEDY,
        generator: torch.Generator | None = None,
    ) -> Tree:
        state.pending = torch.cat((state.pending, state.pending.new_tensor([root])))
        committed = state.cache.length() + state.pending.numel()
        room = self.model.spec.max_positions - committed + 1  # the deepest nodes never run
        if room < 1:  # the target's context may be longer than the draft's
            return Tree.of_root(root)
        output = self.model.forward(state.pending[None], cache=state.cache, logits=slice(-1, None))
        state.pending = state.pending[:0]
        step = _TreeStep(self.model, state.cache)
        assert output.logits is not None
        logp = _log_q(output.logits[0, -1])
        tree = grow(logp, step, plan.cut(room), root, sampling=sampling, generator=generator)
        state.cache.keep([committed], committed, [torch.empty(0, dtype=torch.int64)])
        return tree

    def commit(self, state: LanguageModelState, tree: Tree, path: Tensor, output: TargetOutput) -> LanguageModelState:
        state.pending = torch.cat((state.pending, tree.tokens[path[1:]].to(state.pending.device)))
        return state


class _TreeStep:
    """Runs tree nodes through the language model, one call per level."""

    def __init__(self, model: Target, cache: Cache) -> None:
        self.model, self.cache = model, cache
        self.position = cache.length()
        self.mask = LevelMask(model.device)

    def __call__(self, tokens: Tensor, parent_rows: Tensor) -> Tensor:
        positions = torch.full_like(tokens, self.position)[None]
        mask = self.mask.extend(parent_rows)
        output = self.model.forward(tokens[None], cache=self.cache, positions=positions, mask=mask, logits=slice(None))
        self.position += 1
        assert output.logits is not None
        return _log_q(output.logits[0])


def _log_q(logits: Tensor) -> Tensor:
    """Log-probabilities in at least fp32."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
