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
from data.module import DraftDataModule
from data.prepare import Prepared
from data.vocabulary import DraftVocabulary
from spec_decode.drafter import VocabularyDrafter
from spec_decode.errors import DraftwrightError, first_line
from spec_decode.formats import export_draft, find_layout
from spec_decode.target_hf import HFTarget, TargetSource, open_target, tokenizer_fingerprint
from spec_decode.tree import TreePlan
from train.callbacks import KeepRandomState, LogProgress, StepCheckpoint, StopOnSignal, TrainingTime, progress_bar
from train.checks import check_draft, check_fit, check_module, check_strategy, place, try_optimizer, try_trainer
from train.draft import build_draft
from train.export import Card, write_readme
from train.inputs import data_record, open_datamodule, prepare_chats
from train.module import DraftModule
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
        prepared, vocabulary = prepare_chats(settings, target, tokenizer)
    if start is not None:
        vocabulary = DraftVocabulary(start.vocabulary(), target.spec.vocab_size)
    now |= data_identity(prepared.train, vocabulary.ids)
    if checkpoint:
        refuse_changes(checkpoint, then, now)
    record["data"] = data_record(settings, prepared, vocabulary)
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
        datamodule = open_datamodule(settings, target, prepared, draft.taps)  # may capture for long
    clock = TrainingTime()
    trainer = _trainer(settings, datamodule, logger, [RememberSettings(now), clock])
    with _plain_interrupt():
        trainer.fit(module, datamodule=datamodule, ckpt_path=checkpoint, weights_only=True)
        record["training_seconds"] = clock.seconds()
        trainer.save_checkpoint(folder / LAST)
    opened = _Opened(source, target, tokenizer, prepared, tree)
    return _finish(settings, opened, record, trainer, module, datamodule, logger)


@dataclasses.dataclass(frozen=True)
class _Opened:
    """What training read: the target, the chats, the tree that the draft will be measured with."""

    source: TargetSource
    target: HFTarget
    tokenizer: PreTrainedTokenizerBase
    prepared: Prepared
    tree: TreePlan


def _finish(
    settings: TrainSettings,
    opened: _Opened,
    record: dict[str, Any],
    trainer: Trainer,
    module: DraftModule,
    datamodule: DraftDataModule,
    logger: Any,
) -> dict[str, Any]:
    """Write the draft, measure it, export it. What is done by then stays if the next step fails."""
    folder = settings.output_dir
    draft = module.whole_draft()
    card = _card(settings, opened.target, record, trainer.global_step)
    if trainer.is_global_zero:
        draft.save_pretrained(folder / "draft", readme=card.text())
    print(f"draft written to {folder / 'draft'}")
    metrics = _heldout_metrics(trainer, module, datamodule)
    if not trainer.is_global_zero:
        return {"metrics": metrics, "eval": None, "draft": str(folder / "draft")}
    name = f"{opened.target.spec.name}-{settings.variant.name}"
    tuned = module.export_target(folder / name, opened.tokenizer)
    if tuned is not None:
        print(f"tuned target written to {tuned}")
        opened = _with_target(opened, dataclasses.replace(opened.source, path=str(tuned), package=None))
        card = dataclasses.replace(card, tuned=True, choose_target=_choose_target(opened.source.path))
    write_readme(folder / "draft", dataclasses.replace(card, metrics=metrics))
    write_record(folder, "run.json", {**record, "metrics": metrics})
    report = _evaluate(settings, opened, draft, record["training_seconds"])
    if isinstance(logger, WandbLogger):
        parameters = sum(parameter.numel() for parameter in draft.parameters())
        report_to_wandb(logger.experiment, settings.variant.name, folder, parameters, report or {})
    for name in settings.exports:
        write_export(folder / "draft", name, served(opened.source, opened.target), folder / "export" / name)
    return {"metrics": metrics, "eval": report, "draft": str(folder / "draft")}


def _with_target(opened: _Opened, source: TargetSource) -> _Opened:
    target, tokenizer = open_target(source)
    return dataclasses.replace(opened, source=source, target=target, tokenizer=tokenizer)


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
    settings: TrainSettings, opened: _Opened, draft: VocabularyDrafter, training_seconds: float
) -> dict[str, Any] | None:
    """Decode held-out prompts with and without the draft. The one place where training starts evaluation."""
    from eval.run import evaluate, fit_draft
    from spec_decode.sampling import Sampling

    if not settings.eval.enabled or not settings.eval.limit:
        return None
    folder = settings.output_dir
    prompts = opened.prepared.heldout_prompts[: settings.eval.limit]
    if not prompts:
        print(f"nothing is held out, so the draft is not decoded: use python -m eval checkpoint={folder / 'draft'}")
        return None
    if getattr(torch, settings.eval.dtype) != opened.target.dtype:
        opened = _with_target(opened, dataclasses.replace(opened.source, dtype=settings.eval.dtype))
    fit_draft(draft, opened.target, opened.tokenizer, str(folder / "draft"))
    return evaluate(
        opened.target,
        opened.tokenizer,
        draft,
        {"held_out": prompts},
        tree=opened.tree,
        max_new_tokens=settings.eval.max_new_tokens,
        sampling=Sampling(temperature=settings.eval.temperature),
        seed=settings.seed,
        output_dir=folder / "eval",
        draft_name=settings.variant.name,
        training_seconds=training_seconds,
    )
