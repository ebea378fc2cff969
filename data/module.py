"""LightningDataModule: whole documents grouped into batches of about `tokens_per_batch` tokens.

The training batches of all epochs form one plan, a pure function of (lengths, seed), that Lightning runs as one pass.
A position in the plan is therefore all that a checkpoint needs to continue in the middle of an epoch, with any number
of processes: a batch of the plan is one optimiser step of all of them, and each reads only its share.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from itertools import count
from typing import Any

import torch
from lightning.pytorch import LightningDataModule

from data.batch import Batch, Share
from data.features import FeatureSource
from spec_decode.errors import DraftwrightError

_OPEN_BATCHES = 32  # batches that are filled at the same time: more waste less room, fewer stay closer to the shuffle


def pack(lengths: list[int], order: list[int], budget: int) -> list[list[int]]:
    """Group the documents in `order` into batches of at most `budget` tokens, first fit.

    A document longer than the budget gets a batch of its own. Every document appears exactly once.
    """
    done: list[list[int]] = []
    opened: list[tuple[list[int], int]] = []  # (documents, room left)
    for document in order:
        length = lengths[document]
        slot = next((i for i, (_, room) in enumerate(opened) if length <= room), None)
        if slot is not None:
            documents, room = opened[slot]
            opened[slot] = ([*documents, document], room - length)
            continue
        opened.append(([document], budget - length))
        if len(opened) > _OPEN_BATCHES:
            fullest = min(range(len(opened)), key=lambda i: opened[i][1])
            done.append(opened.pop(fullest)[0])
    return done + [documents for documents, _ in opened]


def epoch_batches(lengths: list[int], budget: int, seed: int, epoch: int) -> list[list[int]]:
    """The batches of one epoch: documents and then batches shuffled by a generator made from (seed, epoch)."""
    digest = sha256(f"{seed} {epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    batches = pack(lengths, torch.randperm(len(lengths), generator=generator).tolist(), budget)
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def training_plan(
    lengths: list[int], budget: int, seed: int, *, epochs: int, max_steps: int | None = None
) -> list[list[int]]:
    """The batches of a whole run, one per optimiser step: `epochs` passes, or exactly `max_steps` batches."""
    plan: list[list[int]] = []
    for epoch in range(epochs) if max_steps is None else count():
        if max_steps is not None and len(plan) >= max_steps:
            break
        plan += epoch_batches(lengths, budget, seed, epoch)
    return plan if max_steps is None else plan[:max_steps]


def split_batch(documents: list[int], lengths: list[int], parts: int) -> list[list[int]]:
    """The documents of one batch in `parts` lists of about equal tokens; a list is empty where there are too few."""
    split: list[list[int]] = [[] for _ in range(parts)]
    tokens = [0] * parts
    for document in sorted(documents, key=lambda document: -lengths[document]):
        lightest = tokens.index(min(tokens))
        split[lightest].append(document)
        tokens[lightest] += lengths[document]
    return split


class PlanLoader:
    """Yields this process's share of the batches of a plan, from the position that `load_state_dict` set."""

    def __init__(self, source: FeatureSource, plan: list[list[int]]) -> None:
        self.source, self.plan = source, plan
        self._start = self._position = 0
        self.divide(0, 1, 1)
        self._digest = sha256(json.dumps(plan).encode()).hexdigest()[:16]

    def divide(self, rank: int, processes: int, micro_batches: int) -> None:
        """Each batch is split over this many processes, of which this is number `rank`, and micro-batches."""
        self._rank, self._processes, self._micro_batches = rank, processes, micro_batches

    def __len__(self) -> int:
        return len(self.plan) * self._micro_batches

    def __iter__(self) -> Iterator[Batch]:
        start, self._start = self._start, 0
        for index in range(start, len(self.plan)):
            self._position = index + 1  # before the yield: a checkpoint taken after this batch goes on with the next
            yield from self._parts(self.plan[index])

    def _parts(self, documents: list[int]) -> Iterator[Batch]:
        parts = self._processes * self._micro_batches
        if parts == 1:
            yield self.source.batch(documents)
            return
        tokens = self.source.sequences.select(documents)
        for mine in split_batch(documents, self.source.lengths, parts)[self._rank :: self._processes]:
            shortest = min(documents, key=lambda document: self.source.lengths[document])
            yield replace(self.source.batch(mine or [shortest]), share=Share(tokens, parts, spare=not mine))

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position, "plan": self._digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises DraftwrightError if the checkpoint was written while training on other batches."""
        if state["plan"] != self._digest:
            raise DraftwrightError(
                "the checkpoint in ckpt_path was written with other data, batches or seed, so training can't continue "
                "at the same batch: repeat the command that started that run and add ckpt_path"
            )
        self._start = self._position = state["position"]


class DraftDataModule(LightningDataModule):
    """Training and held-out batches over two feature sources.

    tokens_per_batch: token budget of a batch, which all processes share; seed: of the shuffling; epochs or max_steps:
    length of the run. Raises DraftwrightError for a number below 1, or if the training source holds no documents.
    """

    def __init__(
        self,
        train: FeatureSource,
        heldout: FeatureSource,
        *,
        tokens_per_batch: int,
        seed: int,
        epochs: int,
        max_steps: int | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("tokens_per_batch", tokens_per_batch), ("epochs", epochs), ("max_steps", max_steps)):
            if value is not None and value < 1:
                raise DraftwrightError(f"{name} must be at least 1, got {value}")
        if not train.lengths:
            raise DraftwrightError("no conversation is left to train on: give more data or lower heldout_tokens")
        plan = training_plan(train.lengths, tokens_per_batch, seed, epochs=epochs, max_steps=max_steps)
        self._train = PlanLoader(train, plan)
        self._heldout = PlanLoader(heldout, pack(heldout.lengths, list(range(len(heldout.lengths))), tokens_per_batch))

    def setup(self, stage: str) -> None:
        if self.trainer is not None:
            rank, processes = self.trainer.global_rank, self.trainer.world_size
            self._train.divide(rank, processes, self.trainer.accumulate_grad_batches)
            self._heldout.divide(rank, processes, 1)

    @property
    def total_steps(self) -> int:
        """Number of optimiser steps of the whole run."""
        return len(self._train.plan)

    def train_dataloader(self) -> PlanLoader:
        return self._train

    def val_dataloader(self) -> PlanLoader:
        return self._heldout

    # Lightning restores a stateful loader only if nothing asked for the number of steps before (a schedule does, in
    # configure_optimizers), so the position travels with the data module.
    def state_dict(self) -> dict[str, Any]:
        for loader in (self._train, self._heldout):
            loader.source.flush()  # what a checkpoint counts as seen is on disk
        return self._train.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._train.load_state_dict(state_dict)
