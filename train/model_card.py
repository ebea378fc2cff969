"""The README.md of an exported draft: what it was trained on, what was measured, how to serve it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from spec_decode.drafters.block import BlockDraft
from spec_decode.drafters.dspark import DSparkDraft
from spec_decode.drafters.eagle import EagleDraft
from spec_decode.drafters.eagle3 import Eagle3Draft
from spec_decode.drafters.medusa import MedusaDraftModel
from spec_decode.drafters.p_eagle import PEagleDraft
from spec_decode.formats.layout import SPECULATIVE_TOKENS, ServedTarget
from train.provenance import flat

METHODS: dict[type, str] = {
    Eagle3Draft: "eagle3",
    EagleDraft: "eagle",
    MedusaDraftModel: "medusa",
    BlockDraft: "dflash",
    DSparkDraft: "dspark",
    PEagleDraft: "p_eagle",
}
_IN_VLLM = {PEagleDraft: {"method": "eagle3", "parallel_drafting": True}}  # others go by their method
_SERVERS = {"vllm": "vLLM", "sglang": "SGLang", "speculators": "vLLM", "safeailab": "EAGLE", "medusa": "Medusa"}


def model_card(draft: Any, name: str, target: ServedTarget, checkpoint: Path) -> str:
    """The card in Markdown. What it says of training and measuring comes from run.json and eval/report.json beside the
    checkpoint, as training writes them."""
    method = METHODS[type(draft)]
    licence = target_licence(target.location)
    beside = checkpoint.resolve().parent if checkpoint.resolve().name == "draft" else None
    run = _read(beside / "run.json") if beside else {}
    report = _read(beside / "eval" / "report.json") if beside else {}
    head = {"license": licence, "base_model": None if Path(target.location).is_dir() else target.location}
    front = "".join(f"{key}: {value}\n" for key, value in head.items() if value)
    return f"""---
{front}tags:
- speculative-decoding
- {method}
---
# {method} draft for {target.spec.name}

A draft model for speculative decoding, trained with Draftwright and stored as {_SERVERS[name]} reads it
(format={name}). It proposes tokens for `{target.location}` and no other target.

## Trained on

{_training(run)}

## Measured

{_measured(report)}

## Serve

{_serve(draft, name, target)}

FOLDER is the folder of this file. Draftwright reads it back with `python -m train import path=FOLDER out=DRAFT`.

## Licence of the target

{licence or "Not known: see where the target comes from"}.
"""


def target_licence(location: str) -> str | None:
    """What the header of the target's own card says, where the card is on this machine."""
    card = Path(location) / "README.md"
    if not Path(location).is_dir():
        cached = try_to_load_from_cache(location, "README.md")
        card = Path(cached) if isinstance(cached, str) else card
    try:
        lines = card.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    header = lines[1 : lines.index("---", 1)] if lines[:1] == ["---"] and "---" in lines[1:] else []
    found = [line.partition(":")[2].strip().strip("\"'") for line in header if line.startswith("license:")]
    return found[0] if found and found[0] else None


def _training(run: Mapping[str, Any]) -> str:
    """Data and recipe."""
    if not run.get("data"):
        return "Not recorded."
    config, data = run["config"], run["data"]
    train = data["train"]
    module = {key: value for key, value in flat({"module": config["module"]}, ".").items() if "._" not in key}
    recipe = {key: config.get(key) for key in ("epochs", "max_steps", "max_length", "draft_vocab_size")} | module
    lines = [
        f"- data: {config['dataset']['name']} ({data['source']})",
        f"- {train['conversations']:,} conversations, {train['tokens']:,} tokens, {train['supervised_tokens']:,} of "
        "them supervised",
        "- recipe: " + ", ".join(f"{key}={value}" for key, value in recipe.items() if value is not None),
        f"- command: `{run['command']}`",
        f"- Draftwright commit: {run['git_commit'] or 'unknown (not run from a git checkout)'}",
    ]
    if run.get("training_seconds") is not None:
        lines.append(f"- time: {run['training_seconds'] / 60:.0f} minutes on {run['machine']}")
    return "\n".join(lines)


def _measured(report: Mapping[str, Any]) -> str:
    """τ and speedup of each benchmark."""
    if not report.get("benchmarks"):
        return "Not measured."
    rows = []
    for name, numbers in report["benchmarks"].items():
        tau = "–" if numbers["tau"] is None else f"{numbers['tau']:.2f}"
        interval = numbers["speedup_ci"]
        span = f" ({interval[0]:.2f}–{interval[1]:.2f})" if interval else ""
        rows.append(f"| {name} | {numbers['prompts']} | {tau} | {numbers['speedup']:.2f}{span} |")
    where = report["environment"]
    machine = where["cpu"] if where["device"] == "cpu" else where["device"]
    tree = report["tree"]["kind"]
    return "\n".join(
        [
            "| benchmark | prompts | τ | speedup (95 %) |",
            "|---|---|---|---|",
            *rows,
            "",
            f"By Draftwright's decoder on {machine}, {where['dtype']}, temperature {report['temperature']}, {tree} "
            f"tree, {where['max_new_tokens']} new tokens, {where['date'][:10]}. A server's numbers differ.",
        ]
    )


def speculative_config(draft: Any) -> dict[str, Any]:
    """What vLLM is to be told of a draft whose files lie in FOLDER."""
    kind, k = type(draft), getattr(draft.config, "num_drafts", SPECULATIVE_TOKENS)
    if kind is MedusaDraftModel:
        k = min(k, draft.config.num_heads)
    return {"method": METHODS[kind], "model": "FOLDER", **_IN_VLLM.get(kind, {}), "num_speculative_tokens": k}


def _serve(draft: Any, name: str, target: ServedTarget) -> str:
    """The commands for vLLM and SGLang, or where the format is for neither, how its own code loads it."""
    method, place = METHODS[type(draft)], shlex.quote(target.location)
    speculative = speculative_config(draft)
    k = speculative["num_speculative_tokens"]
    if name == "speculators":
        return "vLLM:\n\n    vllm serve FOLDER"
    if name == "vllm":
        return f"vLLM:\n\n    vllm serve {place} --speculative-config '{json.dumps(speculative)}'"
    if name == "sglang":
        return (
            f"SGLang, with the dtype of your choice for both models:\n\n"
            f"    python -m sglang.launch_server --model-path {place} --dtype bfloat16 \\\n"
            f"      --speculative-algorithm {method.upper()} --speculative-draft-model-path FOLDER \\\n"
            f"      --speculative-num-steps {k} --speculative-eagle-topk 1 --speculative-num-draft-tokens {k + 1}"
        )
    loaded = {
        "safeailab": f"EaModel.from_pretrained(use_eagle3={method == 'eagle3'}, base_model_path={target.location!r}, "
        "ea_model_path=FOLDER)",
        "medusa": "MedusaModel.from_pretrained(FOLDER)",
    }
    return f"In Python, with {_SERVERS[name]}'s own code:\n\n    {loaded[name]}\n\n{_other_servers(method)}"


def _other_servers(method: str) -> str:
    formats = "`format=vllm`" if method == "medusa" else "`format=vllm` and `format=sglang`"
    return f"For vLLM and SGLang, export the draft again with {formats}."


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
