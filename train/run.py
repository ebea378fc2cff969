"""One training run: target, data, features, draft, Lightning, finished draft folder, held-out decoding."""

from __future__ import annotations

import dataclasses
import logging
import shlex
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import wandb
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_class, instantiate
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import WandbLogger
from omegaconf import DictConfig
from transformers import PreTrainedTokenizerBase
from wandb.errors import Error as WandbError

from conf import build_section, plain
from conf.check import build
from data.batch import Sequences
from data.features import Features, FeatureSource, NoFeatures, cached_features
from data.module import DraftDataModule
from data.prepare import Prepared, prepare
from data.vocabulary import DraftVocabulary, build_draft_vocabulary, structure_tokens
from spec_decode.drafter import VocabularyDrafter
from spec_decode.errors import DraftwrightError, first_line
from spec_decode.formats import export_draft, find_layout
from spec_decode.target_hf import HFTarget, TargetSource, open_target, tokenizer_fingerprint
from spec_decode.tree import TreePlan
from train.callbacks import KeepRandomState, LogProgress, StepCheckpoint, StopOnSignal, TrainingTime, progress_bar
from train.checks import check_draft, check_fit, check_module, check_strategy, place, try_optimizer, try_trainer
from train.draft import build_draft
from train.export import Card, write_readme
from train.nonfinite import GuardSteps
from train.processes import first_process_speaks, in_turn
from train.provenance import command_line, hyperparameters, provenance, write_record
from train.publish import served, write_export
from train.resume import (
    LAST,
    OF_THE_DATA,
    AtomicCheckpointIO,
    RememberSettings,
    data_identity,
    find_checkpoint,
    identity,
    refuse_changes,
    saved_settings,
)
from train.settings import TrainSettings
from train.start import check_start, copy_weights, load_start, start_identity
from train.wandb_report import report_to_wandb


def train(cfg: DictConfig) -> dict[str, Any]:
    """Train the configured draft. Returns {"metrics": held-out metrics, "eval": report or None, "draft": folder}.

    Raises DraftwrightError for a user's mistake and TrainingStopped when a signal ended training early.
    """
    config = plain(cfg)
    settings = build(TrainSettings, config)
    try:
        with first_process_speaks():
            return _train(settings, config)
    finally:
        wandb.finish()  # each job of a sweep is a W&B run of its own


def _train(settings: TrainSettings, config: dict[str, Any]) -> dict[str, Any]:
    _quiet_lightning()
    folder, checkpoint = settings.output_dir, find_checkpoint(settings.ckpt_path, settings.output_dir)
    then = saved_settings(checkpoint) if checkpoint else {}
    tree = build_section(settings.tree, "tree")
    kind, options = _draft_kind(settings)
    check_draft(kind, options)
    for name in settings.exports:
        find_layout(kind, name)
    start = load_start(settings.init_from, kind)
    module_factory = _module_factory(settings)
    tried = try_trainer(instantiate(settings.trainer, _convert_="all"))
    check_strategy(tried, get_class(settings.module["_target_"]))
    source = place(settings.target, tried)
    one_at_a_time = partial(in_turn, settings.cache_dir, tried.world_size)
    record = provenance(config)
    write_record(folder, "run.json", record)
    logger = _logger(settings, record)  # before the long work, so that a missing key shows at once

    with one_at_a_time():
        _ = source.location  # converts a packaged target
    target, tokenizer = open_target(source)
    check_fit(settings, kind, options, target.spec)
    check_start(settings, start, target.spec.vocab_size, tokenizer_fingerprint(tokenizer))
    now = identity(settings, target) | start_identity(start)
    if checkpoint:
        refuse_changes(checkpoint, then, now | {key: then.get(key) for key in OF_THE_DATA})  # these once they are read
    with one_at_a_time():
        prepared, vocabulary = _prepare(settings, target, tokenizer)
    if start is not None:
        vocabulary = DraftVocabulary(start.vocabulary(), target.spec.vocab_size)
    now |= data_identity(prepared.train, vocabulary.ids)
    if checkpoint:
        refuse_changes(checkpoint, then, now)
    record["data"] = _data_record(settings, prepared, vocabulary)
    write_record(folder, "run.json", record)
    if logger:
        logger.log_hyperparams(hyperparameters({"data": record["data"]}))

    # What ran before may have drawn random numbers, on a first run other ones than later.
    seed_everything(settings.seed, verbose=False)
    draft = build_draft(kind, target, vocabulary.ids, tokenizer_fingerprint(tokenizer), **options)
    copy_weights(settings.init_from, start, draft)
    for name in settings.exports:
        export_draft(draft, name, served(source, target))  # says now what a format can't hold
    module = module_factory(draft=draft, target=target)
    with one_at_a_time():
        datamodule = _datamodule(settings, target, prepared, draft.taps)  # may capture for long
    clock = TrainingTime()
    trainer = _trainer(settings, datamodule, logger, [RememberSettings(now), clock])
    with _plain_interrupt():
        trainer.fit(module, datamodule=datamodule, ckpt_path=checkpoint, weights_only=True)
        record["training_seconds"] = clock.seconds()
        trainer.save_checkpoint(folder / LAST)
    draft = module.whole_draft()
    card = _card(settings, target, record, trainer.global_step)
    if trainer.is_global_zero:
        draft.save_pretrained(folder / "draft", readme=card.text())
    print(f"draft written to {folder / 'draft'}")
    metrics = _heldout_metrics(trainer, module, datamodule)
    if not trainer.is_global_zero:
        return {"metrics": metrics, "eval": None, "draft": str(folder / "draft")}
    tuned = module.export_target(folder / f"{target.spec.name}-{settings.variant.name}", tokenizer)
    if tuned is not None:
        print(f"tuned target written to {tuned}")
        source = dataclasses.replace(source, path=str(tuned), package=None)
        target, tokenizer = open_target(source)
        card = dataclasses.replace(card, tuned=True, choose_target=_choose_target(source.path))
    write_readme(folder / "draft", dataclasses.replace(card, metrics=metrics))
    write_record(folder, "run.json", {**record, "metrics": metrics})
    report = _evaluate(settings, source, target, tokenizer, draft, prepared, tree, record["training_seconds"])
    if isinstance(logger, WandbLogger):
        parameters = sum(parameter.numel() for parameter in draft.parameters())
        report_to_wandb(logger.experiment, settings.variant.name, folder, parameters, report or {})
    for name in settings.exports:
        write_export(folder / "draft", name, served(source, target), folder / "export" / name)
    return {"metrics": metrics, "eval": report, "draft": str(folder / "draft")}


def _quiet_lightning() -> None:
    """Hide what Lightning says about itself, not what it says about the run."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    for message in (
        ".*LeafSpec.*deprecated",
        "Checkpoint directory .* not empty",
        "The dirpath has changed",
        "It is recommended to use .*sync_dist=True",  # train/metrics.py has summed over the processes
    ):
        warnings.filterwarnings("ignore", message=message)


def _draft_kind(settings: TrainSettings) -> tuple[Any, dict[str, Any]]:
    """The draft's class and the options of its config."""
    options = dict(settings.draft)
    return get_class(options.pop("kind")), options


def _module_factory(settings: TrainSettings) -> Any:
    """The module that lacks draft and target."""
    options = {key: value for key, value in settings.module.items() if not key.startswith("_")}
    check_module(get_class(settings.module["_target_"]), options)
    factory = instantiate(settings.module, _convert_="all")
    try_optimizer(factory)
    return factory


def _prepare(
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


def _data_record(settings: TrainSettings, prepared: Prepared, vocabulary: DraftVocabulary) -> dict[str, Any]:
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


def _datamodule(
    settings: TrainSettings, target: HFTarget, prepared: Prepared, taps: tuple[int, ...]
) -> DraftDataModule:
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


def _logger(settings: TrainSettings, record: dict[str, Any]) -> Any:
    """The configured logger with the run's record in it, or False for none."""
    if not settings.logger.get("_target_"):
        return False
    logger = instantiate(settings.logger, _convert_="all")
    try:
        logger.log_hyperparams(hyperparameters(record))
    except WandbError as error:
        raise DraftwrightError(
            f"W&B can't start the run ({' '.join(str(error).split())}): run `wandb login`, or use logger=wandb_offline"
        ) from error
    except TypeError as error:  # W&B gets unknown keys when the run starts
        raise DraftwrightError(f"a key of logger.* is unknown ({first_line(error)}): remove it") from error
    return logger


def _trainer(settings: TrainSettings, datamodule: DraftDataModule, logger: Any, own: Sequence[Callback]) -> Trainer:
    """All epochs are one pass over the plan (data/module.py), so Lightning sees a single epoch."""
    callbacks: list[Callback] = [
        progress_bar(datamodule.total_steps),
        LogProgress(),
        KeepRandomState(),
        GuardSteps(settings.output_dir, settings.on_nan, settings.output_dir / LAST),
        *own,
        StopOnSignal(settings.output_dir / LAST),
        StepCheckpoint(
            dirpath=settings.output_dir,
            filename=LAST.removesuffix(".ckpt"),
            train_time_interval=timedelta(minutes=settings.checkpoint_minutes),
            enable_version_counter=False,
        ),
    ]
    return instantiate(
        settings.trainer,
        _convert_="all",
        max_epochs=1,
        val_check_interval=min(settings.trainer["val_check_interval"], datamodule.total_steps)
        * (settings.trainer.get("accumulate_grad_batches") or 1),  # Lightning counts micro-batches
        limit_val_batches=len(datamodule.val_dataloader()),
        default_root_dir=str(settings.output_dir),
    )(callbacks=callbacks, logger=logger, plugins=[AtomicCheckpointIO()])


@contextmanager
def _plain_interrupt() -> Iterator[None]:
    """Lightning turns a second Ctrl-C into a silent exit with status 1; the launcher handles it better."""
    try:
        yield
    except SystemExit as error:
        raise KeyboardInterrupt from error


def _heldout_metrics(trainer: Trainer, module: LightningModule, datamodule: DraftDataModule) -> dict[str, float]:
    """The metrics of the finished draft: those of the last step where it was a validation step, else measured now."""
    if not len(datamodule.val_dataloader()):
        return {}
    found: Mapping[str, Any] = trainer.callback_metrics
    if "val/loss" not in found or trainer.global_step % int(trainer.val_check_batch or 1):
        with _plain_interrupt():
            found = trainer.validate(module, datamodule=datamodule, verbose=False)[0]
    return {name: float(value) for name, value in found.items() if name.startswith("val/")}


def _card(settings: TrainSettings, target: HFTarget, record: dict[str, Any], steps: int) -> Card:
    data = record["data"]
    return Card(
        variant=settings.variant.name,
        target=target.spec.name,
        choose_target=_choose_target(settings.target.path),
        dataset=settings.dataset.name,
        source=data["source"],
        conversations=data["train"]["conversations"],
        tokens=data["train"]["tokens"],
        supervised_tokens=data["train"]["supervised_tokens"],
        steps=steps,
        covered=data["train"]["covered"],
        command=command_line(),
        git_commit=record["git_commit"],
        metrics={},
    )


def _choose_target(path: str | None) -> str:
    """The words that choose this target on the command line, in any folder."""
    if path is None:
        return f"target={HydraConfig.get().runtime.choices['target']}"
    return f"target=hf target.path={shlex.quote(str(Path(path).resolve()) if Path(path).exists() else path)}"


def _evaluate(
    settings: TrainSettings,
    source: TargetSource,
    target: HFTarget,
    tokenizer: PreTrainedTokenizerBase,
    draft: VocabularyDrafter,
    prepared: Prepared,
    tree: TreePlan,
    training_seconds: float,
) -> dict[str, Any] | None:
    """Decode held-out prompts with and without the draft. The one place where training starts evaluation."""
    from eval.run import evaluate, fit_draft
    from spec_decode.sampling import Sampling

    if not settings.eval.enabled or not settings.eval.limit:
        return None
    folder = settings.output_dir
    if not prepared.heldout_prompts:
        print(f"nothing is held out, so the draft is not decoded: use python -m eval checkpoint={folder / 'draft'}")
        return None
    if getattr(torch, settings.eval.dtype) != target.dtype:
        target, tokenizer = open_target(dataclasses.replace(source, dtype=settings.eval.dtype))
    fit_draft(draft, target, tokenizer, str(folder / "draft"))
    return evaluate(
        target,
        tokenizer,
        draft,
        {"held_out": prepared.heldout_prompts[: settings.eval.limit]},
        tree=tree,
        max_new_tokens=settings.eval.max_new_tokens,
        sampling=Sampling(temperature=settings.eval.temperature),
        seed=settings.seed,
        output_dir=folder / "eval",
        draft_name=settings.variant.name,
        training_seconds=training_seconds,
    )
