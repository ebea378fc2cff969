"""DSpark draft (arXiv:2607.05147): DFlash's block, whose tokens also depend on the one drafted before.

    h_k = norm(x)_k                                              [H]   slot k of a shifted block, see drafters/block.py
    q^k = softmax(W h_k + W2 W1[x_{anchor+k}])                   [V]   predicts x_{anchor+1+k}; Markov head of rank r
    c_k = sigmoid(u . [h_k; W1[x_{anchor+k}]])                         confidence that the draft at k will be accepted

The block runs once; the Markov head then takes a small product for each level of a tree, whose branches differ by
their last token. The head is linear in [h_k; W1[x_{anchor+k}]], so the unembedding of a step is [W W2].

Where c_k is below `confidence_threshold`, nothing is drafted behind that token. The decision sees h_k and the token
before, never the draft that it is about: leaving out drafts by what they are would bias the output (appendix A).
W1 has a row for every target token, since an anchor can lie outside the draft vocabulary; u has no bias but that of
an imported draft.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spec_decode.drafters.block import BlockConfig, BlockDraft, BlockState
from spec_decode.errors import DraftwrightError, check_positive, check_type
from spec_decode.growth import grow
from spec_decode.sampling import GREEDY, Sampling
from spec_decode.tree import Tree, TreePlan


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(BlockConfig):
    """Everything that shapes a DSpark draft. confidence_threshold: below it nothing is drafted; 0 drafts always.
    confidence_bias: what published drafts add to u . [h_k; W1[x_{anchor+k}]]; ours have none."""

    shifted: bool = True
    markov_rank: int = 64
    confidence_threshold: float = 0.0
    confidence_bias: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(markov_rank=self.markov_rank)
        for name in ("confidence_threshold", "confidence_bias"):
            check_type(name, getattr(self, name), int | float, "a number")
        if not 0 <= self.confidence_threshold <= 1:
            raise DraftwrightError(f"confidence_threshold must lie from 0 to 1, got {self.confidence_threshold}")


class MarkovHead(nn.Module):
    """W2 W1[token], zero at first. Named as the optimiser tells embeddings and heads from other matrices."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.markov_rank)
        self.lm_head = nn.Linear(config.markov_rank, config.draft_vocab_size, bias=False)
        nn.init.normal_(self.embed_tokens.weight, std=config.markov_rank**-0.5)
        nn.init.zeros_(self.lm_head.weight)


class DSparkDraft(BlockDraft):
    """See the module's docstring."""

    config: DSparkConfig

    def __init__(self, config: DSparkConfig) -> None:
        check_type("config", config, DSparkConfig, "a DSparkConfig")
        super().__init__(config)
        self.markov_head = MarkovHead(config)
        self.confidence = nn.Parameter(torch.zeros(config.hidden_size + config.markov_rank))

    def heads(self) -> list[Tensor]:
        return [torch.cat((self.lm_head.weight, self.markov_head.lm_head.weight), dim=1)]

    def joined(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """What the head reads: h [..., H] and the target ids [...] before the predicted tokens -> [..., H + r]."""
        return torch.cat((hidden, self.markov_head.embed_tokens(previous)), dim=-1)

    def propose(
        self,
        state: BlockState,
        root: int,
        plan: TreePlan,
        sampling: Sampling = GREEDY,
        generator: torch.Generator | None = None,
    ) -> Tree:
        plan = plan.cut(self.config.num_drafts)
        step = _TreeStep(self, self.run_block(state, root)[: plan.depth])
        if not step.confident([root])[0]:
            return Tree.of_root(root)
        anchor = torch.tensor([root], device=self.confidence.device)
        return grow(
            step(anchor, anchor)[0],
            step,
            plan,
            root,
            self.draft_vocabulary(),
            sampling=sampling,
            generator=generator,
            expands=step.confident,
        )


class _TreeStep:
    """Runs one level of a tree, the root first: one slot of the block, over the last tokens of all branches."""

    def __init__(self, draft: DSparkDraft, hidden: Tensor) -> None:
        self.draft, self.hidden, self.depth = draft, hidden, 0
        self.logits = draft.lm_head(hidden)

    def __call__(self, tokens: Tensor, _parent_rows: Tensor) -> Tensor:
        """Target ids [M] -> log-probabilities [M, V_draft]."""
        head = self.draft.markov_head
        logits = self.logits[self.depth] + head.lm_head(head.embed_tokens(tokens))
        self.depth += 1
        return logits.float().log_softmax(-1)

    def confident(self, tokens: list[int]) -> list[bool]:
        """Whether to draft behind each token of the level that runs next."""
        threshold = self.draft.config.confidence_threshold
        if threshold == 0:
            return [True] * len(tokens)
        previous = torch.tensor(tokens, device=self.hidden.device)
        joined = self.draft.joined(self.hidden[self.depth].expand(len(tokens), -1), previous)
        confidence = (joined @ self.draft.confidence + self.draft.config.confidence_bias).sigmoid()
        return (confidence >= threshold).tolist()
