"""`python -m eval simulate`: what a static tree yields per step, before any target time is spent on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from omegaconf import DictConfig
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable

from conf import plain
from conf.check import Between, Positive, Seed, Share, build
from eval.plots import histogram_plot
from spec_decode.checkpoint import as_text, write_folder
from spec_decode.errors import DraftwrightError
from spec_decode.search import (
    Table,
    best_trees,
    expected_tokens,
    length_distribution,
    prune,
    rank_table,
    static_shapes,
)
from spec_decode.tree import FixedTree, Ranks, StaticTree, chain, paths_of

SHAPES = 5  # best static shapes that are listed
LARGEST_SWEEP = 128  # nodes; the number of shapes grows fast


@dataclass(frozen=True)
class SimulateSettings:
    """The keys of conf/simulate.yaml."""

    shape: tuple[Positive, ...]
    accuracy: tuple[Share, ...]
    rounds: Positive
    threshold: Share | None
    nodes: Annotated[int, Between(1, LARGEST_SWEEP)] | None
    seed: Seed
    output_dir: Path

    def __post_init__(self) -> None:
        if len(self.accuracy) < len(self.shape):
            raise DraftwrightError(
                f"shape={list(self.shape)} has {len(self.shape)} levels but accuracy={list(self.accuracy)} has "
                f"{len(self.accuracy)}: give one number for each level"
            )


@dataclass(frozen=True)
class Simulated:
    """One shape: tokens per step in closed form and simulated, with the standard error of the latter; the share of
    the steps that accept 0, 1, … drafts, likewise."""

    name: str
    nodes: int
    expected: float
    mean: float
    error: float
    expected_lengths: list[float]
    lengths: list[float]


def run(cfg: DictConfig) -> list[Simulated]:
    """The command: simulate, print, plot."""
    settings = build(SimulateSettings, plain(cfg))
    table = rank_table(settings.accuracy, max(settings.nodes or 0, *settings.shape))
    random = np.random.default_rng(settings.seed)
    tree = StaticTree(settings.shape)
    shapes: list[tuple[str, FixedTree]] = [
        (f"chain of {tree.depth}", chain(tree.depth)),
        (f"tree {list(settings.shape)}", tree),
    ]
    if settings.threshold is not None:
        if (pruned := prune(tree, table, settings.threshold)) is None:
            raise DraftwrightError(f"threshold={settings.threshold} drops every node: lower it")
        shapes.append((f"pruned at {settings.threshold:g}", pruned))
    if settings.nodes is not None:
        shapes += [(str(list(shape.branching)), shape) for shape in best_static(table, settings.nodes)]
        shapes.append((f"best {settings.nodes} nodes", best_trees(table, settings.nodes)[-1]))
    found = [simulate(name, plan, table, settings.rounds, random) for name, plan in shapes]
    _show(found, settings)
    svg = histogram_plot({one.name: {"accept_length_histogram": one.lengths} for one in found[:2]})
    write_folder(settings.output_dir, {"lengths.svg": as_text(svg)})
    print(settings.output_dir / "lengths.svg")
    return found


def best_static(table: Table, nodes: int) -> list[StaticTree]:
    """The SHAPES static shapes of at most `nodes` nodes that yield most, best first; ties go to fewer nodes."""
    levels = [np.cumsum(row) for row in table]

    def tokens(shape: StaticTree) -> float:
        return float(1 + np.cumprod([levels[i][width - 1] for i, width in enumerate(shape.branching)]).sum())

    def size(shape: StaticTree) -> int:
        return int(np.cumprod(shape.branching).sum())

    return sorted(static_shapes(nodes, len(table)), key=lambda shape: (-tokens(shape), size(shape)))[:SHAPES]


def simulate(name: str, plan: FixedTree, table: Table, rounds: int, random: np.random.Generator) -> Simulated:
    """Play `rounds` steps: at each node that a step reaches, chance decides which child is accepted, if any."""
    at: dict[Ranks, int] = {(): rounds}
    accepted = np.zeros(plan.depth + 1, dtype=np.int64)
    for path in [(), *paths_of(plan)]:
        here, width = at.pop(path, 0), plan.width(path)
        row = [table[len(path)][rank] for rank in range(width)] if width else []
        *below, stopped = random.multinomial(here, [*row, max(0.0, 1 - sum(row))])
        at |= {(*path, rank): int(count) for rank, count in enumerate(below)}
        accepted[len(path)] += stopped
    values = np.arange(len(accepted)) + 1
    mean = float(accepted @ values / rounds)
    error = float(np.sqrt(accepted @ (values - mean) ** 2 / max(1, rounds - 1) / rounds))
    shares = (accepted / rounds).tolist()
    exact = length_distribution(plan, table)
    return Simulated(name, len(paths_of(plan)), expected_tokens(plan, table), mean, error, exact, shares)


def _show(found: Sequence[Simulated], settings: SimulateSettings) -> None:
    table = RichTable("shape", box=SIMPLE_HEAD, pad_edge=False)
    for column in ("nodes", "tokens per step", "simulated"):
        table.add_column(column, justify="right")
    for one in found:
        table.add_row(one.name, str(one.nodes), f"{one.expected:.4f}", f"{one.mean:.4f} ± {one.error:.4f}")
    console = Console(highlight=False)
    console.print(table)
    console.print(f"simulated: {settings.rounds:,} steps, mean ± standard error; share of steps by drafts accepted:")
    for one in found:
        pairs = enumerate(zip(one.expected_lengths, one.lengths, strict=True))
        shares = ", ".join(f"{accepted}: {exact:.3f} ({seen:.3f})" for accepted, (exact, seen) in pairs)
        console.print(f"  {one.name}  {shares}")
    line, tree = found[:2]
    console.print(f"tree over chain: {tree.expected / line.expected:.3f}")
