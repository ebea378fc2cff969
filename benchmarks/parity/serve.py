"""What vLLM decodes greedily, and what it counts. Runs in .venv-vllm, called by benchmarks/parity/vllm_table.py.

python benchmarks/parity/serve.py JOB.json OUT.json

JOB: model, prompts (token ids), new_tokens, and speculative (vLLM's speculative_config, or null). End-of-turn doesn't
stop, so that every answer has new_tokens tokens. The first prompt runs once before the clock starts.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams


def main(job: dict[str, Any]) -> dict[str, Any]:
    llm = LLM(
        model=job["model"],
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=1,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=job["speculative"],
    )
    greedy = SamplingParams(temperature=0, max_tokens=job["new_tokens"], ignore_eos=True, detokenize=False)
    prompts: list[Any] = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    llm.generate(prompts[:1], greedy, use_tqdm=False)
    before = counters(llm)
    began = time.perf_counter()
    answers = llm.generate(prompts, greedy, use_tqdm=False)
    seconds = time.perf_counter() - began
    counted = {name: [b - a for a, b in zip(before[name], now, strict=True)] for name, now in counters(llm).items()}
    return {"tokens": [list(answer.outputs[0].token_ids) for answer in answers], "seconds": seconds, **counted}


def counters(llm: LLM) -> dict[str, list[int]]:
    """drafts: [number of drafts]; accepted: [P], in how many of them position p was accepted; both [0] without."""
    found = {metric.name: metric for metric in llm.get_metrics()}
    drafts: Any = found.get("vllm:spec_decode_num_drafts")
    accepted: Any = found.get("vllm:spec_decode_num_accepted_tokens_per_pos")
    return {"drafts": [drafts.value if drafts else 0], "accepted": list(accepted.values) if accepted else [0]}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
