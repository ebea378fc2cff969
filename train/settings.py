"""What `python -m train` can be told: the keys of conf/train.yaml and conf/variant/, their types and their ranges."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from conf.check import Between, Dtype, Natural, NonNegative, Positive, Seed, Share, convert
from data.sources import Source
from data.states import StateDtype
from spec_decode.errors import DraftwrightError
from spec_decode.target_hf import TargetSource

Format = Literal["vllm", "sglang", "speculators", "safeailab", "medusa"]  # those of spec_decode/formats

# Ranges in sections whose remaining keys belong to the class that the section names.
_RANGES: dict[tuple[str, str], Any] = {
    ("module", "steps"): Positive,
    ("module", "decay"): Share,
    ("module", "lr"): NonNegative,
    ("trainer", "val_check_interval"): Positive,
    ("trainer", "log_every_n_steps"): Positive,
    ("trainer", "gradient_clip_val"): NonNegative | None,
    ("trainer", "accumulate_grad_batches"): Positive | None,
}
# What train/run.py tells the trainer itself.
_OURS = ("callbacks", "default_root_dir", "limit_val_batches", "logger", "max_epochs",
         "max_steps", "plugins")  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """Which variant is trained."""

    name: str


@dataclass(frozen=True)
class FinalEval:
    """Decoding the held-out prompts at the end."""

    enabled: bool
    limit: Natural
    max_new_tokens: Positive
    temperature: NonNegative
    dtype: Dtype


@dataclass(frozen=True)
class TrainSettings:
    """The composed config of a training run; draft, module, trainer, logger and tree go to the class they name."""

    variant: Variant
    draft: dict[str, Any]
    module: dict[str, Any]
    target: TargetSource
    dataset: Source
    trainer: dict[str, Any]
    logger: dict[str, Any]
    tree: dict[str, Any]
    eval: FinalEval
    unroll_steps: Positive
    seed: Seed
    max_length: Annotated[int, Between(2)]
    train_tokens: Positive | None
    vocabulary_tokens: Positive
    heldout_tokens: Natural
    tokens_per_batch: Positive
    features: Literal["cache", "hybrid", "online", "none"]
    features_dtype: StateDtype
    cache_dir: Path
    epochs: Positive
    max_steps: Positive | None
    draft_vocab_size: Positive | None
    output_dir: Path
    checkpoint_minutes: NonNegative
    on_nan: Literal["stop", "skip"]
    ckpt_path: Path | None
    init_from: Path | None
    export: Format | tuple[Format, ...] | None

    def __post_init__(self) -> None:
        for (section, key), hint in _RANGES.items():
            convert(getattr(self, section).get(key), hint, f"{section}.{key}")
        for key in _OURS:
            if key in self.trainer:
                raise DraftwrightError(
                    f"trainer.{key} is set by Draftwright: use epochs, max_steps, tokens_per_batch, output_dir, "
                    "heldout_tokens or logger"
                )

    @property
    def exports(self) -> tuple[Format, ...]:
        if self.export is None:
            return ()
        return self.export if isinstance(self.export, tuple) else (self.export,)
