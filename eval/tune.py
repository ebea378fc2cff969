"""`python -m eval tune`: the static tree that makes a draft fastest on this machine.

1. Decode prompts with a wide calibration tree and count which candidates are accepted, by depth and rank.
2. Time passes of the target over 1, 2, 4, … tokens, and the draft at every depth.
3. For each depth and number of nodes find the tree that yields most tokens per step (`spec_decode.search`); the best
   of all is the one with the most tokens per second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from omegaconf import DictConfig
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable

from conf import plain
from conf.check import Between, Positive, build
from data.prompts import load_prompts
from eval.bench import check_lengths
from eval.costs import Costs, measure_costs
from eval.plots import tuning_plot
from eval.report import environment
from eval.run import encode, fit_draft, progress
from eval.settings import check_device
from spec_decode.checkpoint import as_text, write_folder
from spec_decode.decode import DecodeResult, speculative_decode
from spec_decode.drafters import load_draft
from spec_decode.errors import DraftwrightError
from spec_decode.search import best_trees, expected_tokens
from spec_decode.target_hf import TargetSource, open_target
from spec_decode.tree import FixedTree, SparseTree, paths_of
from spec_decode.tree_file import write_tree

DEPTH = 5  # levels of the calibration tree
RANK_SUM = 3  # its paths are those whose ranks add up to at most this: 125 nodes


@dataclass(frozen=True)
class TuneSettings:
    """The keys of conf/tune.yaml."""

    target: TargetSource
    checkpoint: Path | None
    benchmark: str
    path: str | None
    limit: Positive | None
    max_new_tokens: Positive
    nodes: Annotated[int, Between(2, 256)]
    context: Positive
    draft_name: str
    output_dir: Path

    def __post_init__(self) -> None:
        if self.checkpoint is None:
            raise DraftwrightError("no draft is chosen: pass checkpoint=FOLDER, the folder that training wrote")
        check_device(self.target.device)


@dataclass(frozen=True)
class Candidate:
    """A tree, its expected tokens per step, and its expected speedup over plain decoding."""

    tree: SparseTree
    tau: float
    speedup: float

    @property
    def nodes(self) -> int:
        """With the root."""
        return len(self.tree.paths) + 1


def run(cfg: DictConfig) -> Candidate:
    """The command: calibrate, time, search, print, write."""
    settings = build(TuneSettings, plain(cfg))
    draft = load_draft(str(settings.checkpoint))
    prompts = load_prompts(settings.benchmark, settings.path, settings.limit)
    target, tokenizer = open_target(settings.target)
    fit_draft(draft, target, tokenizer, str(settings.checkpoint))
    ids = encode(tokenizer, settings.benchmark, prompts)
    check_lengths(settings.benchmark, ids, target.spec.max_positions)
    calibration = calibration_tree()
    results = []
    with progress() as bar:
        task = bar.add_task("calibrating", total=len(ids))
        for prompt in ids:
            results.append(
                speculative_decode(target, draft, prompt, tree=calibration, max_new_tokens=settings.max_new_tokens)
            )
            bar.advance(task)
    table = acceptance_by_rank(results, calibration)
    by_depth = [best_trees(table[:depth], settings.nodes - 1) for depth in range(1, max(1, len(table)) + 1)]
    context = torch.cat(ids)[: settings.context].to(target.device)
    costs = measure_costs(target, draft, context, by_depth)
    candidates = search(by_depth, table, costs)
    best = max(candidates, key=lambda one: one.speedup)
    write_tree(
        best.tree,
        settings.output_dir / "tree.json",
        nodes=best.nodes,
        expected_tau=best.tau,
        expected_speedup=best.speedup,
        acceptance_by_rank=table,
        plain_s=costs.plain,
        verify_s={str(size): seconds for size, seconds in zip(costs.sizes, costs.verify, strict=True)},
        draft_s={str(depth): seconds for depth, seconds in enumerate(costs.draft, start=1)},
        environment=environment(target.dtype, target.device, {"benchmark": settings.benchmark}),
    )
    budgets = range(2, settings.nodes + 1)
    svg = tuning_plot(budgets, [one.tau for one in candidates], [one.speedup for one in candidates])
    write_folder(settings.output_dir, {"speedup.svg": as_text(svg)})
    _show(table, costs, candidates, best, settings.output_dir)
    return best


def calibration_tree() -> SparseTree:
    """Every path of at most DEPTH levels whose ranks add up to at most RANK_SUM."""
    ranks = range(RANK_SUM + 1)
    return SparseTree(
        tuple(path for depth in range(1, DEPTH + 1) for path in product(ranks, repeat=depth) if sum(path) <= RANK_SUM)
    )


def acceptance_by_rank(results: Sequence[DecodeResult], plan: FixedTree) -> list[list[float]]:
    """table[d - 1][r]: of the rounds that accepted d - 1 drafts and had a child of rank r there, the share that
    accepted it. Stops at the first depth that no round got to. A round says nothing beyond what it offered: the end
    of the context, or a drafted end-of-turn."""
    offered = np.zeros((plan.depth, 1 + max(rank for path in paths_of(plan) for rank in path)))
    accepted = np.zeros_like(offered)
    for result in results:
        for ranks, deepest in zip(result.ranks, result.offered, strict=True):
            for depth in range(min(len(ranks) + 1, deepest)):
                offered[depth, : plan.width(ranks[:depth])] += 1
                if depth < len(ranks):
                    accepted[depth, ranks[depth]] += 1
    shares = np.divide(accepted, offered, out=np.zeros_like(offered), where=offered > 0)
    return [row.tolist() for row, tried in zip(shares, offered, strict=True) if tried[0] > 0]


def search(by_depth: Sequence[Sequence[SparseTree]], table: Sequence[Sequence[float]], costs: Costs) -> list[Candidate]:
    """For each number of nodes the fastest of the trees that yield most at each depth, by_depth[d - 1][n - 1]."""
    fastest = []
    for trees in zip(*by_depth, strict=True):
        found = [_candidate(tree, table, costs) for tree in trees]
        fastest.append(max(found, key=lambda one: one.speedup))
    return fastest


def _candidate(tree: SparseTree, table: Sequence[Sequence[float]], costs: Costs) -> Candidate:
    tau = expected_tokens(tree, table)
    return Candidate(tree, tau, tau * costs.plain / costs.round(len(tree.paths) + 1, tree.depth))


def _show(
    table: Sequence[Sequence[float]], costs: Costs, candidates: Sequence[Candidate], best: Candidate, folder: Path
) -> None:
    console = Console()
    accepted = RichTable("depth", *(f"rank {rank + 1}" for rank in range(len(table[0]))), box=SIMPLE_HEAD)
    for depth, row in enumerate(table, start=1):
        accepted.add_row(str(depth), *(f"{share:.3f}" for share in row))
    console.print("share accepted, by depth and rank", accepted)
    trees = RichTable("at most", "nodes", "depth", "τ", "draft ms", "verify ms", "speedup", box=SIMPLE_HEAD)
    for budget, one in enumerate(candidates, start=2):
        if budget & (budget - 1) == 0 or one is best or one is candidates[-1]:
            draft, verify = costs.draft_at(one.nodes, one.tree.depth), costs.verify_at(one.nodes)
            cells = (f"{one.tau:.2f}", f"{1000 * draft:.1f}", f"{1000 * verify:.1f}", f"{one.speedup:.2f}×")
            trees.add_row(
                str(budget), str(one.nodes), str(one.tree.depth), *cells, style="bold" if one is best else None
            )
    console.print("expected, by number of nodes (root included)", trees)
    for name in ("tree.json", "speedup.svg"):
        console.print(folder / name, soft_wrap=True, highlight=False)
