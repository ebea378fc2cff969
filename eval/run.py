"""Measure a draft on prompts: decode both ways, then report.json, report.html and a table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from conf import build_section, plain
from conf.check import build
from data.chat import encode_prompt
from data.messages import Message, UnusableRow
from data.prompts import load_prompts
from eval.bench import Pair, check_lengths, measure
from eval.examples import Example, make_example
from eval.html import page
from eval.report import describe_tree, environment, show
from eval.settings import EvalSettings
from eval.tau import at_least_fp32, baseline_s_per_forward, differences, partings, refuse_unexplained, summarise
from spec_decode.checkpoint import as_text, write_folder
from spec_decode.drafter import Drafter
from spec_decode.drafters import load_draft
from spec_decode.errors import DraftwrightError
from spec_decode.lossy import LossyTypicalAcceptance
from spec_decode.packed_linear import pack_linears
from spec_decode.sampling import Sampling
from spec_decode.target_hf import HFTarget, open_target, tokenizer_fingerprint
from spec_decode.tree import TreePlan

EXAMPLES = 3  # decoded answers that the page shows


def run(cfg: DictConfig) -> dict[str, Any]:
    """The command: load the draft, the prompts and the target as configured, then `evaluate`."""
    settings = build(EvalSettings, plain(cfg))
    sampling = Sampling(settings.temperature, settings.top_k, settings.top_p)
    tree = build_section(settings.tree, "tree")
    draft = load_draft(str(settings.checkpoint))
    prompts = {name: load_prompts(name, settings.path, settings.limit) for name in settings.benchmarks}
    target, tokenizer = open_target(settings.target)  # last, because it takes long
    fit_draft(draft, target, tokenizer, str(settings.checkpoint))
    report = evaluate(
        target,
        tokenizer,
        draft,
        prompts,
        tree=tree,
        max_new_tokens=settings.max_new_tokens,
        sampling=sampling,
        seed=settings.seed,
        output_dir=settings.output_dir,
        draft_name=settings.draft_name,
        lossy=LossyTypicalAcceptance() if settings.acceptance == "lossy_typical" else None,
        training_seconds=recorded_training_seconds(str(settings.checkpoint)),
    )
    refuse_unexplained(report["benchmarks"], target.dtype)
    return report


def recorded_training_seconds(checkpoint: str) -> float | None:
    """What run.json beside a folder draft/ says, as training writes both; None where there is no such record."""
    folder = Path(checkpoint).resolve()
    if folder.name != "draft":
        return None
    try:
        return float(json.loads((folder.parent / "run.json").read_text())["training_seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def fit_draft(draft: Drafter, target: HFTarget, tokenizer: PreTrainedTokenizerBase, folder: str) -> None:
    """Make both ready to decode: the draft on the target's device, in its dtype, with its shared weights.

    Raises DraftwrightError if the draft is another target's. On a CPU their weights are packed, so neither can be
    trained afterwards.
    """
    config: Any = draft.config
    if config.tokenizer not in ("", tokenizer_fingerprint(tokenizer)):  # an imported draft may not know its tokenizer
        raise DraftwrightError(
            f"the draft in {folder} was trained with another tokenizer or chat template than that of "
            f"{target.spec.name}: choose the target it was trained for with target=… or target.path=…"
        )
    draft.to(device=target.device, dtype=target.dtype).eval()
    draft.bind(target)
    pack_linears(target.model)
    pack_linears(draft)


def evaluate(
    target: HFTarget,
    tokenizer: PreTrainedTokenizerBase,
    draft: Drafter,
    benchmarks: Mapping[str, Sequence[Sequence[Message]]],
    *,
    tree: TreePlan,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int,
    output_dir: str | Path,
    draft_name: str,
    lossy: LossyTypicalAcceptance | None = None,
    training_seconds: float | None = None,
) -> dict[str, Any]:
    """Decode every prompt with and without the draft; write both reports to output_dir and print the table.

    The draft is bound to the target, in its dtype and in eval mode (`fit_draft`). Each prompt is a conversation that
    ends with a user's turn. training_seconds: what the report says of the draft's making. Returns what report.json
    holds. Raises DraftwrightError for an empty benchmark or a prompt that is too long, before anything is decoded.
    """
    ids = {name: encode(tokenizer, name, prompts) for name, prompts in benchmarks.items()}
    for name, prompts in ids.items():
        check_lengths(name, prompts, target.spec.max_positions)
    pairs: dict[str, list[Pair]] = {}
    with progress() as bar:
        for name, prompts in ids.items():
            task = bar.add_task(name, total=len(prompts))
            pairs[name] = measure(
                target,
                draft,
                prompts,
                tree=tree,
                max_new_tokens=max_new_tokens,
                sampling=sampling,
                seed=seed,
                lossy=lossy,
                warm_up=not pairs,
                advance=partial(bar.advance, task),
            )
    return write_report(
        target,
        tokenizer,
        draft,
        benchmarks,
        pairs,
        tree=tree,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        seed=seed,
        output_dir=output_dir,
        draft_name=draft_name,
        lossy=lossy,
        training_seconds=training_seconds,
    )


def write_report(
    target: HFTarget,
    tokenizer: PreTrainedTokenizerBase,
    draft: Drafter,
    benchmarks: Mapping[str, Sequence[Sequence[Message]]],
    pairs: Mapping[str, Sequence[Pair]],
    *,
    tree: TreePlan,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int,
    output_dir: str | Path,
    draft_name: str,
    lossy: LossyTypicalAcceptance | None = None,
    training_seconds: float | None = None,
) -> dict[str, Any]:
    """What `evaluate` does once every prompt is decoded, pairs[benchmark][prompt]."""
    settings = {"max_new_tokens": max_new_tokens, "top_k": sampling.top_k, "top_p": sampling.top_p, "seed": seed}
    numbers = {name: _numbers(found, sampling) for name, found in pairs.items()}
    report = {
        "target": target.spec.name,
        "draft": draft_name,
        "draft_parameters": sum(parameter.numel() for parameter in draft.parameters()),
        "training_seconds": training_seconds,
        "temperature": sampling.temperature,
        "tree": describe_tree(tree),
        "acceptance": "exact" if lossy is None else {"lossy_typical": asdict(lossy)},
        "environment": environment(target.dtype, target.device, settings),
        "benchmarks": numbers,
    }
    examples = _examples(benchmarks, pairs, tokenizer)
    report["examples"] = [asdict(example) for example in examples]
    baseline_s = {name: baseline_s_per_forward([pair.baseline for pair in found]) for name, found in pairs.items()}
    write = partial(_write, report, examples, baseline_s, Path(output_dir))
    write()  # the gaps below may need more memory than there is
    if any(one["differences"] for one in numbers.values()):
        exact = at_least_fp32(target)
        for name, found in pairs.items():
            numbers[name]["differences"] = differences(exact, found, target.dtype)
        write()
    _show(report, Path(output_dir))
    return report


def encode(tokenizer: PreTrainedTokenizerBase, name: str, prompts: Sequence[Sequence[Message]]) -> list[Tensor]:
    """The prompts of one benchmark as token ids, int64 [P] each, up to where the assistant begins to answer."""
    encoded = []
    for i, messages in enumerate(prompts):
        try:
            encoded.append(torch.tensor(encode_prompt(tokenizer, messages), dtype=torch.int64))
        except UnusableRow as error:
            raise DraftwrightError(f"prompt {i} of benchmark '{name}' can't be used: {error}") from error
    return encoded


def _numbers(pairs: Sequence[Pair], sampling: Sampling) -> dict[str, Any]:
    return {**summarise(pairs, greedy=sampling.greedy), "differences": partings(pairs) if sampling.greedy else []}


def _examples(
    benchmarks: Mapping[str, Sequence[Sequence[Message]]],
    pairs: Mapping[str, Sequence[Pair]],
    tokenizer: PreTrainedTokenizerBase,
) -> list[Example]:
    each = max(1, EXAMPLES // len(benchmarks))
    return [
        make_example(name, messages, pair, tokenizer)
        for name, prompts in benchmarks.items()
        for messages, pair in list(zip(prompts, pairs[name], strict=True))[:each]
    ]


def progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("prompts"),
        TimeRemainingColumn(),
    )


def _write(report: dict[str, Any], examples: list[Example], baseline_s: dict[str, float], folder: Path) -> None:
    text = json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    files = {"report.json": text, "report.html": page(report, examples, baseline_s)}
    write_folder(folder, {name: as_text(text) for name, text in files.items()})


def _show(report: dict[str, Any], folder: Path) -> None:
    console = Console()
    show(report, console)
    for name in ("report.json", "report.html"):
        console.print(folder / name, soft_wrap=True, highlight=False)
