"""The steps of the decoding loop, over one sequence or a batch.

    prefill -> draft.start -> [propose -> one target forward over the trees -> verify -> cache.keep -> commit]*

Invariant: for every sequence the cache holds each committed token but the last, so the next forward starts with it.
The sequences of a batch grow at their own pace: each has its own length in the cache, and masks hide the rest. A
sequence that has ended leaves the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from spec_decode.drafter import Drafter
from spec_decode.lossy import LossyTypicalAcceptance, verify_lossy_typical
from spec_decode.sampling import Probabilities, Sampling, choose
from spec_decode.target import Cache, Target, TargetOutput
from spec_decode.tree import Ranks, Tree, TreePlan
from spec_decode.verify import Verdict, verify, verify_greedy


@dataclass
class Running:
    """One prompt on its way. length: positions that the target's cache holds for it."""

    length: int
    tokens: list[int]
    generator: torch.Generator | None
    state: Any
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    accepted: list[int] = field(default_factory=list)
    offered: list[int] = field(default_factory=list)
    ranks: list[Ranks] = field(default_factory=list)


class Rounds:
    """The loop's steps over the sequences that are still in the batch, whose order is that of the cache's rows."""

    def __init__(
        self,
        target: Target,
        draft: Drafter | None,
        plan: TreePlan,
        sampling: Sampling,
        lossy: LossyTypicalAcceptance | None,
        stop: frozenset[int],
        max_new_tokens: int,
    ) -> None:
        self.target, self.draft, self.plan, self.sampling, self.lossy = target, draft, plan, sampling, lossy
        self.stop, self.max_new_tokens = stop, max_new_tokens
        self.cache: Cache = target.new_cache()
        self.wanted: dict[str, Any] = {"cache": self.cache}
        if draft is not None:
            self.wanted |= {"taps": draft.taps, "last_hidden": draft.needs_last_hidden}

    def prefill(self, ids: list[Tensor], generators: list[torch.Generator | None]) -> list[Running]:
        """Run the prompts, padded on the right: under causal attention no real token sees the padding."""
        began = perf_counter()
        output = self.target.forward(pad_sequence(ids, batch_first=True), **self.wanted | {"last_hidden": True})
        assert output.last_hidden is not None
        sequences = []
        for index, (prompt, generator) in enumerate(zip(ids, generators, strict=True)):
            length = prompt.numel()
            logits = self.target.head(output.last_hidden[index, length - 1])
            token = choose(logits, self.sampling, generator)
            state = self.draft.start(output.row(index, length), prompt) if self.draft is not None else None
            sequences.append(Running(length, [token], generator, state))
        seconds = perf_counter() - began
        for sequence in sequences:
            sequence.prefill_seconds = seconds
        return sequences

    def unfinished(self, sequences: list[Running]) -> list[Running]:
        """Those that go on; the others leave the cache."""
        going = [
            len(sequence.tokens) < self.max_new_tokens
            and sequence.tokens[-1] not in self.stop
            and sequence.length < self.target.spec.max_positions
            for sequence in sequences
        ]
        if any(going) and not all(going):
            self.cache.select([row for row, goes in enumerate(going) if goes])
        return [sequence for sequence, goes in zip(sequences, going, strict=True) if goes]

    def advance(self, sequences: list[Running]) -> None:
        """One round for all: draft, verify, commit."""
        began = perf_counter()
        trees = [self._propose(sequence) for sequence in sequences]
        drafted = perf_counter()
        start = self.cache.length()
        output = run_trees(self.target, trees, [sequence.length for sequence in sequences], **self.wanted)
        verdicts = self._verify(sequences, trees, output)
        self.cache.keep([sequence.length for sequence in sequences], start, [verdict.path for verdict in verdicts])
        for sequence, tree, verdict in zip(sequences, trees, verdicts, strict=True):
            _commit(sequence, tree, verdict, self.stop)
        verified = perf_counter()
        if self.draft is not None:
            for row, (sequence, tree, verdict) in enumerate(zip(sequences, trees, verdicts, strict=True)):
                sequence.state = self.draft.commit(sequence.state, tree, verdict.path, output.row(row, len(tree)))
        drafting = drafted - began + perf_counter() - verified if self.draft is not None else 0.0
        for sequence in sequences:
            sequence.draft_seconds += drafting
            sequence.verify_seconds += verified - drafted

    def _propose(self, sequence: Running) -> Tree:
        room = self.target.spec.max_positions - sequence.length - 1  # for the tree below its root
        if self.draft is None or room < 1:
            return Tree.of_root(sequence.tokens[-1])
        return self.draft.propose(
            sequence.state, sequence.tokens[-1], self.plan.cut(room), self.sampling, sequence.generator
        )

    def _verify(self, sequences: list[Running], trees: list[Tree], output: TargetOutput) -> list[Verdict]:
        assert output.logits is not None
        if self.sampling.greedy:
            return [
                verify_greedy(tree, best[: len(tree)])
                for tree, best in zip(trees, output.logits.argmax(dim=-1), strict=True)
            ]
        verdicts = []
        for sequence, tree, logits in zip(sequences, trees, output.logits, strict=True):
            p = Probabilities(logits, self.sampling)
            verdicts.append(
                verify_lossy_typical(tree, p, self.lossy, sequence.generator)
                if self.lossy
                else verify(tree, p, sequence.generator)
            )
        return verdicts


def run_trees(target: Target, trees: list[Tree], lengths: list[int], *, cache: Cache, **wanted: Any) -> TargetOutput:
    """One pass of the target over a tree for each row of the cache, with logits for every node.

    lengths: positions that the cache holds for each row. Trees of fewer nodes are padded at the end. wanted: what else
    of `Target.forward`.
    """
    size = max(len(tree) for tree in trees)
    padded = [tree.padded(size) for tree in trees]
    held, device = torch.tensor(lengths), target.device
    return target.forward(
        torch.stack([tree.tokens for tree in padded]).to(device),
        positions=(held[:, None] + torch.stack([tree.depth() for tree in padded])).to(device),
        mask=_mask(padded, held, cache.length(), device),
        logits=slice(None),
        cache=cache,
        **wanted,
    )


def _commit(sequence: Running, tree: Tree, verdict: Verdict, stop: frozenset[int]) -> None:
    """Take over what the target decided. A drafted end-of-turn takes the bonus token's place: every round yields
    accepted + 1 tokens."""
    new = tree.tokens[verdict.path[1:]].tolist()
    end = next((i for i, token in enumerate(new) if token in stop), None)
    sequence.tokens += [*new, verdict.bonus] if end is None else new[: end + 1]
    sequence.accepted.append(len(new) if end is None else end)
    sequence.offered.append(int(tree.depth().max()) if end is None else end)
    sequence.ranks.append(tree.ranks(verdict.path.tolist())[: sequence.accepted[-1]])
    sequence.length += verdict.path.numel()


def _mask(trees: list[Tree], lengths: Tensor, start: int, device: torch.device) -> Tensor | None:
    """bool [B, N, S] over the last S positions: each node sees its sequence's own positions and its ancestors.

    S leaves out what all sequences hold. None where there is nothing to hide.
    """
    behind = start - int(lengths.min())  # positions that some sequence doesn't hold
    if not behind and len(trees[0]) == 1:
        return None
    held = torch.arange(start - behind, start) < lengths[:, None]
    ancestors = torch.stack([tree.ancestor_mask() for tree in trees])
    return torch.cat((held[:, None].expand(-1, ancestors.shape[1], -1), ancestors), dim=-1).to(device)
