"""One training run: target, data, features, draft, Lightning, finished draft folder, held-out decoding."""

from __future__ import annotations

import dataclasses
import logging
import warnings
import zipfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import wandb
from hydra.utils import get_class, instantiate
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue
from transformers import PreTrainedTokenizerBase
from wandb.errors import Error as WandbError

from data.batch import Sequences
from data.features import FeatureSource, OnlineFeatures, cached_features
from data.module import DraftDataModule
from data.prepare import Prepared, prepare
from data.sources import Source
from data.vocabulary import DraftVocabulary, build_draft_vocabulary, structure_tokens
from spec_decode.drafter import Drafter
from spec_decode.errors import DraftwrightError
from spec_decode.target_hf import HFTarget, open_target, tokenizer_fingerprint
from train.callbacks import KeepRandomState, LogProgress, StopOnSignal, progress_bar
from train.draft import build_draft
from train.export import Card
from train.provenance import command_line, provenance, write_record

LAST = "last.ckpt"


def train(cfg: DictConfig) -> dict[str, Any]:
    """Train the configured draft. Returns {"metrics": held-out metrics, "eval": report or None, "draft": folder}.

    Raises DraftwrightError for a user's mistake and TrainingStopped when a signal ended training early.
    """
    try:
        return _train(cfg)
    finally:
        wandb.finish()  # each job of a sweep is a W&B run of its own


def _train(cfg: DictConfig) -> dict[str, Any]:
    folder, checkpoint = Path(cfg.output_dir), find_checkpoint(cfg)
    record = provenance(_plain(cfg))
    write_record(folder, "run.json", record)
    _quiet_lightning()
    logger = _logger(cfg, record)  # before the long work, so that a missing key shows at once
    seed_everything(cfg.seed, verbose=False)
    target, tokenizer = open_target(_target_source(cfg))
    prepared, vocabulary = _prepare(cfg, target, tokenizer)
    draft = _draft(cfg, target, vocabulary, tokenizer)
    datamodule = _datamodule(cfg, target, prepared, draft.taps)
    module = instantiate(cfg.module, _convert_="all")(draft=draft, target=target)
    trainer = _trainer(cfg, folder, datamodule, logger)
    metrics = _fit(trainer, module, datamodule, checkpoint)
    card = _card(cfg, target, prepared.train, vocabulary, trainer.global_step, record, metrics)
    draft.save_pretrained(folder / "draft", readme=card.text())
    print(f"draft written to {folder / 'draft'}")
    write_record(folder, "run.json", {**record, "metrics": metrics})
    decode = cfg.eval.enabled and cfg.eval.limit > 0 and prepared.heldout_prompts
    report = _evaluate(cfg, target, tokenizer, draft, prepared, folder) if decode else None
    return {"metrics": metrics, "eval": report, "draft": str(folder / "draft")}


def _quiet_lightning() -> None:
    """Hide what Lightning says about itself, not what it says about the run."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    for message in (".*LeafSpec.*deprecated", "Checkpoint directory .* not empty", "The dirpath has changed"):
        warnings.filterwarnings("ignore", message=message)


def find_checkpoint(cfg: DictConfig) -> Path | None:
    """The checkpoint that ckpt_path names; `last` is the newest last.ckpt in output_dir and the folders beside it."""
    if cfg.ckpt_path is None:
        return None
    folder = Path(cfg.output_dir)
    path = Path(cfg.ckpt_path).expanduser()
    if cfg.ckpt_path == "last":
        found = [*folder.glob(LAST), *folder.parent.glob(f"*/{LAST}")]
        if not found:
            raise DraftwrightError(f"ckpt_path=last finds no {LAST} in {folder.parent}/*: pass ckpt_path=FILE")
        path = max(found, key=lambda file: file.stat().st_mtime)
    if not zipfile.is_zipfile(path):
        raise DraftwrightError(f"the checkpoint {path} is missing or damaged: pass the path of a complete {LAST}")
    return path


def _target_source(cfg: DictConfig) -> dict[str, Any]:
    """The target's section, with device=auto resolved to where the trainer runs."""
    gpu = cfg.trainer.accelerator in ("gpu", "cuda")
    if gpu and not torch.cuda.is_available():
        raise DraftwrightError("trainer.accelerator=gpu but torch finds no CUDA device: use trainer=cpu")
    source = _plain(cfg.target)
    if source["device"] == "auto":
        source["device"] = "cuda" if gpu else "cpu"
    return source


def _prepare(cfg: DictConfig, target: HFTarget, tokenizer: PreTrainedTokenizerBase) -> tuple[Prepared, DraftVocabulary]:
    """Training and held-out sequences, and the draft vocabulary.

    Counting tokens costs little beside training on them, so the vocabulary is counted on more conversations.
    """
    budget = cfg.train_tokens and max(cfg.train_tokens, cfg.vocabulary_tokens)
    source = Source.from_config(_plain(cfg.dataset))
    prepared = prepare(
        tokenizer, source, max_length=cfg.max_length, train_tokens=budget, heldout_tokens=cfg.heldout_tokens
    )
    print("\n".join(prepared.report.lines()))
    forced = structure_tokens(tokenizer, target.spec.eos_token_ids)
    vocabulary = build_draft_vocabulary(prepared.train, cfg.draft_vocab_size, target.spec.vocab_size, forced)
    if cfg.train_tokens:
        prepared = dataclasses.replace(prepared, train=prepared.train.prefix(cfg.train_tokens))
    print(
        f"training on {len(prepared.train):,} conversations, {prepared.train.ids.numel():,} tokens; the draft "
        f"vocabulary of {vocabulary.ids.numel():,} covers {vocabulary.coverage(prepared.train):.2%} of the supervised "
        f"tokens there and {vocabulary.coverage(prepared.heldout):.2%} of the held-out ones"
    )
    return prepared, vocabulary


def _draft(cfg: DictConfig, target: HFTarget, vocabulary: DraftVocabulary, tokenizer: PreTrainedTokenizerBase) -> Any:
    options = _plain(cfg.draft)
    kind = get_class(options.pop("kind"))
    return build_draft(kind, target, vocabulary.ids, tokenizer_fingerprint(tokenizer), **options)


def _datamodule(cfg: DictConfig, target: HFTarget, prepared: Prepared, taps: tuple[int, ...]) -> DraftDataModule:
    def features(name: str, sequences: Sequences) -> FeatureSource:
        if cfg.features == "online":
            return OnlineFeatures(target, sequences, taps)
        return cached_features(target, sequences, taps, cfg.cache_dir, name)

    if cfg.features not in ("cache", "online"):
        raise DraftwrightError(f"features='{cfg.features}' is unknown; choose cache or online")
    return DraftDataModule(
        features("train", prepared.train),
        features("heldout", prepared.heldout),
        tokens_per_batch=cfg.tokens_per_batch,
        seed=cfg.seed,
        epochs=cfg.epochs,
        max_steps=cfg.max_steps,
    )


def _logger(cfg: DictConfig, record: dict[str, Any]) -> Any:
    """The configured logger with the run's record in it, or False for none."""
    if not cfg.logger._target_:
        return False
    logger = instantiate(cfg.logger, _convert_="all")
    try:
        logger.log_hyperparams(record)
    except WandbError as error:
        raise DraftwrightError(
            f"W&B can't start the run ({' '.join(str(error).split())}): run `wandb login`, or use logger=wandb_offline"
        ) from error
    return logger


def _trainer(cfg: DictConfig, folder: Path, datamodule: DraftDataModule, logger: Any) -> Trainer:
    """All epochs are one pass over the plan (data/module.py), so Lightning sees a single epoch."""
    callbacks: list[Callback] = [
        progress_bar(datamodule.total_steps),
        LogProgress(),
        KeepRandomState(),
        StopOnSignal(folder / LAST),
        ModelCheckpoint(
            dirpath=folder,
            filename=LAST.removesuffix(".ckpt"),
            train_time_interval=timedelta(minutes=cfg.checkpoint_minutes),
            enable_version_counter=False,
        ),
    ]
    return instantiate(
        cfg.trainer,
        _convert_="all",
        max_epochs=1,
        val_check_interval=min(cfg.trainer.val_check_interval, datamodule.total_steps),
        limit_val_batches=len(datamodule.val_dataloader()),
        default_root_dir=str(folder),
    )(callbacks=callbacks, logger=logger)


def _fit(
    trainer: Trainer, module: LightningModule, datamodule: DraftDataModule, checkpoint: Path | None
) -> dict[str, float]:
    """Train, validate once more at the end, return the held-out metrics."""
    try:
        trainer.fit(module, datamodule=datamodule, ckpt_path=checkpoint, weights_only=True)
    except RuntimeError as error:
        if checkpoint is None or "loading state_dict" not in str(error):
            raise
        raise DraftwrightError(
            f"the checkpoint {checkpoint} belongs to another draft or configuration: repeat the command that started "
            "that run and add ckpt_path"
        ) from error
    if not len(datamodule.val_dataloader()):
        return {}
    metrics = trainer.validate(module, datamodule=datamodule, verbose=False)[0]
    return {name: float(value) for name, value in metrics.items()}


def _card(
    cfg: DictConfig,
    target: HFTarget,
    sequences: Sequences,
    vocabulary: DraftVocabulary,
    steps: int,
    record: dict[str, Any],
    metrics: dict[str, float],
) -> Card:
    return Card(
        variant=cfg.variant.name,
        target=target.spec.name,
        dataset=cfg.dataset.name,
        documents=len(sequences),
        tokens=sequences.ids.numel(),
        supervised_tokens=int(sequences.loss_mask.sum()),
        steps=steps,
        covered=vocabulary.coverage(sequences),
        command=command_line(),
        git_commit=record["git_commit"],
        metrics=metrics,
    )


def _evaluate(
    cfg: DictConfig,
    target: HFTarget,
    tokenizer: PreTrainedTokenizerBase,
    draft: Drafter,
    prepared: Prepared,
    folder: Path,
) -> dict[str, Any]:
    """Decode held-out prompts with and without the draft. The one place where training starts evaluation."""
    from eval.run import evaluate, fit_draft
    from spec_decode.sampling import Sampling

    if cfg.eval.dtype != cfg.target.dtype:
        target, tokenizer = open_target({**_target_source(cfg), "dtype": cfg.eval.dtype})
    fit_draft(draft, target, tokenizer, str(folder / "draft"))
    return evaluate(
        target,
        tokenizer,
        draft,
        {"held_out": prepared.heldout_prompts[: cfg.eval.limit]},
        tree=instantiate(cfg.tree, _convert_="all"),
        max_new_tokens=cfg.eval.max_new_tokens,
        sampling=Sampling(temperature=cfg.eval.temperature),
        seed=cfg.seed,
        output_dir=folder / "eval",
        draft_name=cfg.variant.name,
    )


def _plain(cfg: DictConfig) -> dict[str, Any]:
    try:
        return OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)  # type: ignore[return-value]
    except MissingMandatoryValue as error:
        raise DraftwrightError(f"the config key '{error.full_key}' has no value: pass {error.full_key}=…") from error
