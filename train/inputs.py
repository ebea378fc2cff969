"""What a run trains on: chats, draft vocabulary, batches with target states."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import PreTrainedTokenizerBase

from data.batch import Sequences
from data.features import Features, FeatureSource, NoFeatures, cached_features
from data.module import DraftDataModule
from data.prepare import Prepared, prepare
from data.vocabulary import DraftVocabulary, build_draft_vocabulary, structure_tokens
from spec_decode.target_hf import HFTarget
from train.settings import TrainSettings


def prepare_chats(
    settings: TrainSettings, target: HFTarget, tokenizer: PreTrainedTokenizerBase
) -> tuple[Prepared, DraftVocabulary]:
    """Training and held-out sequences, and the draft vocabulary.

    Counting tokens costs little beside training on them, so the vocabulary is counted on more conversations.
    """
    counted = settings.vocabulary_tokens if settings.draft_vocab_size else 0
    prepared = prepare(
        tokenizer,
        settings.dataset,
        max_length=settings.max_length,
        train_tokens=settings.train_tokens and max(settings.train_tokens, counted),
        heldout_tokens=settings.heldout_tokens,
        cache_dir=settings.cache_dir,
    )
    print("\n".join(prepared.report.lines()))
    forced = structure_tokens(tokenizer, target.spec.eos_token_ids)
    vocabulary = build_draft_vocabulary(prepared.train, settings.draft_vocab_size, target.spec.vocab_size, forced)
    if settings.train_tokens:
        prepared = dataclasses.replace(prepared, train=prepared.train.prefix(settings.train_tokens))
    return prepared, vocabulary


def data_record(settings: TrainSettings, prepared: Prepared, vocabulary: DraftVocabulary) -> dict[str, Any]:
    """What was trained on, as JSON; prints the sizes. covered: share of supervised tokens in the draft vocabulary."""
    sides = {
        name: {
            "conversations": len(side),
            "tokens": side.ids.numel(),
            "supervised_tokens": int(side.loss_mask.sum()),
            "covered": vocabulary.coverage(side),
        }
        for name, side in (("train", prepared.train), ("heldout", prepared.heldout))
    }
    train, heldout = sides["train"], sides["heldout"]
    print(
        f"training on {train['conversations']:,} conversations, {train['tokens']:,} tokens; the draft vocabulary of "
        f"{len(vocabulary):,} covers {train['covered']:.2%} of the supervised tokens there and "
        f"{heldout['covered']:.2%} of the held-out ones"
    )
    return {"source": settings.dataset.place(), **sides, "dropped_rows": dict(prepared.report.dropped)}


def open_datamodule(
    settings: TrainSettings, target: HFTarget, prepared: Prepared, taps: tuple[int, ...]
) -> DraftDataModule:
    """Batches of both sides with the target's states of the layers `taps`, which features=cache captures now."""

    def features(name: str, sequences: Sequences) -> FeatureSource:
        if settings.features == "none":
            return NoFeatures(sequences)
        if settings.features == "online":
            return Features(target, sequences, taps)
        hybrid, dtype = settings.features == "hybrid", settings.features_dtype
        return cached_features(target, sequences, taps, settings.cache_dir, name, dtype=dtype, hybrid=hybrid)

    return DraftDataModule(
        features("train", prepared.train.trimmed()),
        features("heldout", prepared.heldout.trimmed()),
        tokens_per_batch=settings.tokens_per_batch,
        seed=settings.seed,
        epochs=settings.epochs,
        max_steps=settings.max_steps,
    )
