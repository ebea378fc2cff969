"""What `python -m eval` can be told: the keys of conf/eval.yaml, their types and their ranges."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from conf.check import Between, Natural, NonNegative, Positive, Seed
from spec_decode.errors import DraftwrightError, first_line
from spec_decode.target_hf import TargetSource


@dataclass(frozen=True)
class EvalSettings:
    """The composed config of an evaluation; `tree` goes to the class that it names."""

    target: TargetSource
    tree: dict[str, Any]
    checkpoint: Path | None
    benchmark: str | tuple[str, ...]
    path: str | None
    limit: Positive | None
    max_new_tokens: Positive
    temperature: NonNegative
    top_k: Natural
    top_p: Annotated[float, Between(0, 1)]
    acceptance: Literal["exact", "lossy_typical"]
    seed: Seed
    draft_name: str
    output_dir: Path

    def __post_init__(self) -> None:
        if self.checkpoint is None:
            raise DraftwrightError("no draft is chosen: pass checkpoint=FOLDER, the folder that training wrote")
        if self.path and len(self.benchmarks) > 1:
            raise DraftwrightError(
                f"path=… holds the prompts of one benchmark, but {len(self.benchmarks)} are chosen: name one"
            )
        if self.acceptance == "lossy_typical" and self.temperature == 0:
            raise DraftwrightError("acceptance=lossy_typical needs a temperature above 0: at 0 nothing is drawn")
        check_device(self.target.device)

    @property
    def benchmarks(self) -> tuple[str, ...]:
        return (self.benchmark,) if isinstance(self.benchmark, str) else self.benchmark


def check_device(name: str) -> None:
    """Raise DraftwrightError unless torch can use target.device."""
    if name == "auto":
        return
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        raise DraftwrightError(
            f"target.device={name} can't be used here ({first_line(error)}): choose auto, cpu, or a device that "
            "torch finds"
        ) from error
