"""DSpark's heads: children depend on their parent, and a confidence that cuts blocks leaves the output exact."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_decode import growth
from spec_decode.drafters.dspark import DSparkConfig, DSparkDraft
from spec_decode.errors import DraftwrightError
from spec_decode.sampling import Sampling
from spec_decode.toy import BigramLM, MultiLayerCausalLM
from spec_decode.tree import StaticTree, Tree, chain
from spec_decode.verify import Chance, walk

P = torch.tensor([0.7, 0.3], dtype=torch.float64)
SAMPLED = Sampling(temperature=1.0)


class Branches:
    """A source of chance that takes the branch that `script` names at each choice and notes the others."""

    def __init__(self, script: list[int], open_scripts: list[list[int]]) -> None:
        self.script, self.open, self.taken, self.weight = script, open_scripts, 0, 1.0

    def _choose(self, weights: list[float]) -> int:
        possible = [option for option, weight in enumerate(weights) if weight > 0]
        if self.taken == len(self.script):
            self.open += [[*self.script, other] for other in range(1, len(possible))]
            self.script = [*self.script, 0]
        option = possible[self.script[self.taken]]
        self.taken += 1
        self.weight *= weights[option]
        return option

    def accepts(self, probability: float) -> bool:
        return self._choose([probability, 1 - probability]) == 0

    def draw(self, p: Tensor) -> int:
        return self._choose(p.tolist())


def first_two(
    propose: Callable[[], Tree], monkeypatch: pytest.MonkeyPatch, edit: Callable[[Tree], Tree] = lambda tree: tree
) -> dict[tuple[int, ...], float]:
    """The exact distribution of the first two tokens that a round emits; what it leaves open the target draws."""
    total: dict[tuple[int, ...], float] = defaultdict(float)
    scripts: list[list[int]] = [[]]
    while scripts:
        chance: Any = Branches(scripts.pop(), scripts)
        monkeypatch.setattr(growth, "sample", lambda q, generator=None, chance=chance: chance.draw(q))
        tree = edit(propose())
        chances: Chance = chance
        verdict = walk(tree, P.expand(len(tree), -1), chances)
        tokens = [*tree.tokens[verdict.path[1:]].tolist(), verdict.bonus]
        while len(tokens) < 2:
            tokens.append(chance.draw(P))
        total[tuple(tokens[:2])] += chance.weight
    return total


@pytest.fixture
def fair() -> tuple[DSparkDraft, Any]:
    """A draft of two tokens, each with 0.5 everywhere, that is confident behind token 0 and never behind token 1; and
    its state. The target gives them .7 and .3."""
    target = BigramLM(P.expand(2, -1).clone())
    config = DSparkConfig.for_target(target.spec, num_drafts=2, num_layers=1, markov_rank=1, confidence_threshold=0.5)
    draft = DSparkDraft(config).double()
    draft.bind(target)
    draft.lm_head.weight.zero_()
    with torch.no_grad():
        draft.markov_head.embed_tokens.weight.copy_(torch.tensor([[1.0], [-1.0]]))
        draft.confidence.copy_(torch.tensor([0.0, 0.0, 1.0]))
    return draft, lambda: draft.start(target.forward(torch.tensor([[0]]), taps=draft.taps), torch.tensor([0]))


@pytest.mark.parametrize(
    "plan", [chain(2, "independent"), StaticTree((2, 1), "independent"), StaticTree((2, 2), "without_replacement")]
)
@torch.inference_mode()
def test_a_cut_that_does_not_see_its_token_is_exact(
    fair: tuple[DSparkDraft, Any], plan: StaticTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, start = fair
    sizes = set()

    def propose() -> Tree:
        tree = draft.propose(start(), 0, plan, SAMPLED)
        sizes.add(len(tree))
        return tree

    found = first_two(propose, monkeypatch)
    assert found == pytest.approx({(0, 0): 0.49, (0, 1): 0.21, (1, 0): 0.21, (1, 1): 0.09}, rel=1e-6)
    assert len(sizes) > 1 or plan.siblings == "without_replacement"  # blocks were cut in some branches, not in others


@torch.inference_mode()
def test_a_cut_that_sees_its_token_is_not(fair: tuple[DSparkDraft, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The paper's appendix A: .85/.15 in place of .70/.30."""
    draft, start = fair

    def cut(tree: Tree) -> Tree:
        return Tree.of_root(0) if tree.tokens[1] == 1 else tree

    found = first_two(lambda: draft.propose(start(), 0, chain(1, "independent"), SAMPLED), monkeypatch, cut)
    assert found[0, 0] + found[0, 1] == pytest.approx(0.85)
    assert found[1, 0] + found[1, 1] == pytest.approx(0.15)


@torch.inference_mode()
def test_what_is_cut_and_what_is_not(fair: tuple[DSparkDraft, Any]) -> None:
    draft, start = fair
    tree = draft.propose(start(), 0, StaticTree((2, 2)))
    assert tree.tokens.tolist()[:3] in ([0, 0, 1], [0, 1, 0])
    assert tree.parent.tolist() == [-1, 0, 0, *[tree.tokens.tolist().index(0, 1)] * 2]  # behind token 0 alone
    assert len(draft.propose(start(), 1, StaticTree((2, 2)))) == 1  # the root is token 1: nothing is drafted


def real(target: MultiLayerCausalLM, **changes: Any) -> DSparkDraft:
    torch.manual_seed(0)
    draft = DSparkDraft(DSparkConfig.for_target(target.spec, num_drafts=3, markov_rank=4, **changes)).double()
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    draft.bind(target)
    return draft


@torch.inference_mode()
def test_children_depend_on_their_parents_token_alone() -> None:
    target = MultiLayerCausalLM()
    draft, ids = real(target), torch.tensor([5, 17, 3])

    def start() -> Any:
        return draft.start(target.forward(ids[None], taps=draft.taps), ids)

    hidden, tree = draft.run_block(start(), 8), draft.propose(start(), 8, StaticTree((3, 2, 2)))
    depth = tree.depth().tolist()
    weights = draft.markov_head.embed_tokens.weight @ draft.markov_head.lm_head.weight.T
    children: dict[int, list[int]] = defaultdict(list)
    for node, parent in enumerate(tree.parent.tolist()):
        children[parent].append(node)
    orders = set()
    for parent, nodes in children.items():
        if parent < 0:
            continue
        log_q = (draft.lm_head.weight @ hidden[depth[parent]] + weights[tree.tokens[parent]]).log_softmax(-1)
        best = log_q.topk(len(nodes))
        assert tree.tokens[nodes].tolist() == best.indices.tolist()
        torch.testing.assert_close(tree.log_q[nodes].double(), best.values, rtol=0, atol=1e-5)  # type: ignore[index]
        orders.add((depth[parent], *best.indices.tolist()))
    assert len(orders) > 3  # the Markov head makes branches differ


@torch.inference_mode()
def test_the_confidence_by_hand() -> None:
    target, ids, root = MultiLayerCausalLM(), torch.tensor([5, 17, 3]), 8
    draft = real(target)

    def offered(threshold: float) -> list[int]:
        draft.config = replace(draft.config, confidence_threshold=threshold)
        return draft.propose(
            draft.start(target.forward(ids[None], taps=draft.taps), ids), root, chain(3)
        ).tokens.tolist()

    tokens = offered(0.0)
    assert len(tokens) == 4
    hidden = draft.run_block(draft.start(target.forward(ids[None], taps=draft.taps), ids), root)
    before = draft.markov_head.embed_tokens.weight[tokens[:3]]
    draft.config = replace(draft.config, confidence_bias=-0.3)
    confidence = torch.sigmoid(torch.cat((hidden, before), dim=1) @ draft.confidence - 0.3)
    for threshold in (*(confidence - 1e-6).tolist(), *(confidence + 1e-6).tolist(), 1.0):
        sure = (confidence >= threshold).int().cumprod(0).sum()
        assert offered(threshold) == tokens[: 1 + int(sure)]


def test_a_new_draft_is_a_plain_block_that_is_in_doubt_of_itself() -> None:
    target = MultiLayerCausalLM()
    draft = DSparkDraft(DSparkConfig.for_target(target.spec))
    assert (draft.config.block_size, draft.config.num_drafts) == (7, 7)
    assert not draft.markov_head.lm_head.weight.any()
    assert not draft.confidence.any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"markov_rank": 0}, "markov_rank must be at least 1, got 0"),
        ({"confidence_threshold": 1.5}, r"confidence_threshold must lie from 0 to 1, got 1\.5"),
    ],
    ids=["rank", "threshold"],
)
def test_values_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DraftwrightError, match=message):
        DSparkConfig.for_target(MultiLayerCausalLM().spec, **changes)
    with pytest.raises(TypeError, match="config must be a DSparkConfig, not dict"):
        DSparkDraft({"hidden_size": 16})  # type: ignore[arg-type]
