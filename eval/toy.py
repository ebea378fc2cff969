"""`python -m eval toy`: one round of speculative decoding on tiny models, told step by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.tree import Tree as RichTree
from torch import Tensor

from conf import build_section, plain
from conf.check import NonNegative, Positive, Seed, build
from spec_decode.drafter import Drafter
from spec_decode.drafters.eagle3 import Eagle3Config, Eagle3Draft
from spec_decode.drafters.leviathan import LanguageModelDraft
from spec_decode.drafters.medusa import MedusaConfig, MedusaDraftModel
from spec_decode.errors import DraftwrightError
from spec_decode.rounds import run_trees
from spec_decode.sampling import Sampling, choose, probabilities
from spec_decode.target import Target
from spec_decode.toy import BigramLM, MultiLayerCausalLM
from spec_decode.tree import Tree
from spec_decode.verify import Decision, Verdict, verify

LISTED = 4  # tokens of a distribution that are shown


@dataclass(frozen=True)
class ToySettings:
    """The keys of conf/toy.yaml."""

    tree: dict[str, Any]
    model: Literal["transformer", "bigram"]
    draft: Literal["eagle3", "medusa", "leviathan"]
    vocab_size: Positive
    prompt: tuple[int, ...]
    temperature: NonNegative
    seed: Seed


@dataclass(frozen=True)
class Round:
    """One round: what was drafted, the target's distribution at each node [N, V], and what was decided."""

    tree: Tree
    p: Tensor
    verdict: Verdict


def run(cfg: DictConfig) -> Round:
    """The command: build the models, play one round, tell it."""
    settings = build(ToySettings, plain(cfg))
    if not all(0 <= token < settings.vocab_size for token in settings.prompt):
        raise DraftwrightError(f"prompt={list(settings.prompt)} must hold tokens from 0 to {settings.vocab_size - 1}")
    torch.manual_seed(settings.seed)
    target = TARGETS[settings.model](settings.vocab_size, settings.seed)
    draft = DRAFTS[settings.draft](target)
    played = play(
        target,
        draft,
        torch.tensor(settings.prompt),
        build_section(settings.tree, "tree"),
        Sampling(settings.temperature),
        torch.Generator().manual_seed(settings.seed),
    )
    tell(played, Console())
    return played


@torch.inference_mode()
def play(
    target: Target, draft: Drafter, ids: Tensor, plan: Any, sampling: Sampling, generator: torch.Generator
) -> Round:
    """Prefill the prompt ids [P], then draft and verify once."""
    draft.bind(target)
    cache = target.new_cache()
    output = target.forward(ids[None], cache=cache, taps=draft.taps, logits=slice(-1, None), last_hidden=True)
    assert output.logits is not None
    root = choose(output.logits[0, -1], sampling, generator)
    tree = draft.propose(draft.start(output, ids), root, plan, sampling, generator)
    output = run_trees(target, [tree], [ids.numel()], cache=cache)
    assert output.logits is not None
    p = probabilities(output.logits[0], sampling)
    return Round(tree, p, verify(tree, p, generator))


def tell(played: Round, console: Console) -> None:
    """Print the tree with every decision, and the distribution that the last token was drawn from."""
    tree, verdict = played.tree, played.verdict
    decided = {decision.node: decision for decision in verdict.decisions}
    branches: list[RichTree] = [RichTree(f"[bold]{int(tree.tokens[0])}[/bold]  the last committed token")]
    for node in range(1, len(tree)):
        text = _node(tree, node, played.p, decided.get(node))
        branches.append(branches[int(tree.parent[node])].add(text, highlight=False))
    console.print(branches[0])
    path = [int(tree.tokens[node]) for node in verdict.path.tolist()[1:]]
    told = f"accepted {path}" if path else "accepted nothing"
    last = int(verdict.path[-1])
    rejected = sum(int(tree.parent[decision.node]) == last for decision in verdict.decisions)
    after = f"the residual after {rejected} rejection{'s' if rejected > 1 else ''}"
    source = after if rejected else "the target's own distribution"
    console.print(
        f"\n{told}; the token after it, [bold]{verdict.bonus}[/bold], was drawn from {source}:", highlight=False
    )
    console.print(f"  {_distribution(verdict.last)}", highlight=False)
    console.print(f"this round yields {len(path) + 1} token{'s' if path else ''} for one pass of the target")


def _node(tree: Tree, node: int, p: Tensor, decision: Decision | None) -> str:
    token, above = int(tree.tokens[node]), int(tree.parent[node])
    assert tree.log_q is not None
    # What verification divides by; where nothing was drawn, what the draft thought of the token.
    q = float(tree.log_q[node].exp() if tree.q is None else tree.q[node][token])
    text = f"[bold]{token}[/bold]  q {q:.3f}  p {float(p[above, token]):.3f}"
    if decision is None:
        return f"[dim]{text}  not reached[/dim]"
    residual = float(decision.residual[token])
    left = "" if abs(residual - float(p[above, token])) < 1e-12 else f", {residual:.3f} in the residual"
    result = "[green]accepted[/green]" if decision.accepted else "[red]rejected[/red]"
    return f"{text}{left}  {result} with probability {_chance(decision):.3f}"


def _chance(decision: Decision) -> float:
    return decision.probability if decision.accepted else 1 - decision.probability


def _distribution(p: Tensor) -> str:
    values, tokens = p.topk(min(LISTED, int((p > 0).sum())))
    shown = ", ".join(f"{token}: {value:.3f}" for token, value in zip(tokens.tolist(), values.tolist(), strict=True))
    return shown if len(values) == int((p > 0).sum()) else f"{shown}, …"


def _bigram(vocab_size: int, seed: int) -> Target:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(vocab_size, vocab_size, dtype=torch.float64, generator=generator)
    return BigramLM(logits.softmax(-1))


def _eagle3(target: Target) -> Drafter:
    return Eagle3Draft(Eagle3Config.for_target(target.spec)).to(target.dtype).eval()


def _medusa(target: Target) -> Drafter:
    config = MedusaConfig(target.spec.hidden_size, target.spec.vocab_size)
    return MedusaDraftModel(config).to(target.dtype).eval()


def _leviathan(target: Target) -> Drafter:
    return LanguageModelDraft(_bigram(target.spec.vocab_size, seed=1 + torch.initial_seed() % 2**31))


TARGETS: dict[str, Callable[[int, int], Target]] = {
    "transformer": lambda vocab_size, seed: MultiLayerCausalLM(
        vocab_size, seed=seed, std=1.0
    ),  # as sure as real models
    "bigram": _bigram,
}
DRAFTS: dict[str, Callable[[Target], Drafter]] = {"eagle3": _eagle3, "medusa": _medusa, "leviathan": _leviathan}
