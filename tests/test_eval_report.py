"""The report's words, table and page: right numbers, escaped text, nothing outside the page, whole characters."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
import torch
from rich.console import Console

from data.messages import Message
from eval.bench import Pair
from eval.examples import Example, drafted_tokens, make_example, pieces
from eval.html import page
from eval.report import describe_difference, describe_differences, describe_tree, environment, show
from spec_decode.decode import DecodeResult
from spec_decode.tree import DynamicTree, StaticTree


class ByteTokenizer:
    """Token = one byte of UTF-8."""

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")


def numbers(**changes: Any) -> dict[str, Any]:
    values = {
        "tau": 1.83, "speedup": 1.21, "speedup_ci": [1.15, 1.26], "tokens_per_s": 22.3, "baseline_tokens_per_s": 18.4,
        "acceptance_by_position": [0.46, 0.42], "accept_length_histogram": [48, 25, 11], "draft_s_per_round": 0.009,
        "verify_s_per_round": 0.062, "identical": True, "prompts": 16, "new_tokens": 1024, "differences": [],
    }  # fmt: skip
    return values | changes


def report(**benchmarks: dict[str, Any]) -> dict[str, Any]:
    return {
        "target": "<Tiny> & co", "draft": "eagle3", "temperature": 0.0, "tree": describe_tree(DynamicTree(2, 3, 5)),
        "acceptance": "exact",
        "environment": environment(torch.float32, torch.device("cpu"), {"max_new_tokens": 64}),
        "benchmarks": benchmarks or {"mt_bench": numbers()},
    }  # fmt: skip


NEAR_TIE = {"prompt": 3, "position": 41, "baseline_token": 5, "token": 9, "logit_gap": 2.4e-4, "near_tie": True}


def test_trees_and_environment_are_plain_json() -> None:
    assert describe_tree(DynamicTree(2, 3, 5)) == {
        "kind": "dynamic",
        "depth": 2,
        "top_k": 3,
        "nodes": 5,
        "siblings": "top_k",
    }
    assert describe_tree(StaticTree((2, 1))) == {"kind": "static", "branching": (2, 1), "siblings": "top_k"}
    facts = environment(torch.bfloat16, torch.device("cpu"), {"seed": 3})
    assert {"cpu", "cores", "threads", "torch", "transformers", "date", "command"} <= facts.keys()
    assert (facts["dtype"], facts["device"], facts["seed"]) == ("bfloat16", "cpu", 3)


def test_table_fits_80_columns_and_lists_differences() -> None:
    shown = io.StringIO()
    differing = numbers(identical=False, differences=[NEAR_TIE])
    show(report(mt_bench=numbers(), gsm8k=differing), Console(file=shown, width=80))
    lines = shown.getvalue().splitlines()
    assert any(re.fullmatch(r" mt_bench +16 +1\.83 +1\.21× +1\.15–1\.26 +22\.3 +18\.4 +yes *", line) for line in lines)
    assert any(re.fullmatch(r" gsm8k .* 15 of 16 *", line) for line in lines)
    assert "gsm8k: prompt 3 differs from token 41 on" in shown.getvalue()


def test_many_differences_are_shortened_and_low_precision_explained() -> None:
    many = numbers() | {"differences": [NEAR_TIE] * 7, "identical": False}
    told = describe_differences("gsm8k", many, "bfloat16")
    assert len(told) == 7
    assert told[5:] == [
        "gsm8k: 2 more are listed in report.json",
        "gsm8k: in bfloat16 a pass over many tokens rounds otherwise than a pass over one; target.dtype=float32 "
        "compares exactly",
    ]
    assert len(describe_differences("gsm8k", many, "float32")) == 6
    assert describe_differences("gsm8k", numbers(), "bfloat16") == []


def test_a_difference_is_one_sentence() -> None:
    assert describe_difference(NEAR_TIE).endswith("the two tokens lie 0.00024 apart in fp32 logits, a near-tie")
    assert describe_difference(NEAR_TIE | {"logit_gap": 2.0, "near_tie": False}).endswith("not a near-tie")
    assert describe_difference(NEAR_TIE | {"logit_gap": None, "near_tie": False}).endswith("one output ends there")


def test_page_is_self_contained_and_escapes_text() -> None:
    example = Example("mt_bench", "<script>alert(1)</script>", [("a < b ", False), ("<i>", True)], 9, 4)
    text = page(report(), [example], {"mt_bench": 0.049})
    assert "<script" not in text
    assert not re.search(r"(?:src|href)=[\"'](?!#)(?!http://www\.w3\.org)", text)
    assert "url(" not in re.sub(r"url\(#\w+\)", "", text)
    assert text.count("<svg") == 3
    assert "&lt;Tiny&gt; &amp; co" in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "a &lt; b <mark>&lt;i&gt;</mark>" in text
    assert "9 tokens in 4 target passes" in text
    assert "<b>1.83</b>" in text
    assert "<b>1.21×</b><span>speedup 1.15–1.26</span>" in text
    assert "as long as 1.45 plain steps and yields 1.83 tokens" in text
    assert "plain decoding has τ = 1" in text
    assert "differ from plain decoding" not in text


def test_page_shows_differences_and_several_benchmarks() -> None:
    differing = numbers(identical=False, differences=[NEAR_TIE])
    text = page(report(mt_bench=numbers(), gsm8k=differing), [], {"mt_bench": 0.049, "gsm8k": 0.05})
    assert "<li>gsm8k: prompt 3 differs from token 41 on" in text
    assert "15 of 16 outputs are token-identical" in text
    assert text.count('<section class="card">') == 2


def test_page_of_answers_that_end_at_once() -> None:
    empty = numbers(tau=None, speedup_ci=None, acceptance_by_position=[], accept_length_histogram=[], identical=None)
    assert "nothing was drafted" in page(report(mt_bench=empty), [], {"mt_bench": 0.0})


def result(tokens: list[int], accepted: list[int]) -> DecodeResult:
    return DecodeResult(tokens, accepted, [3] * len(accepted), 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("count", "accepted", "expected"),
    [
        (1, [], [False]),
        (5, [0, 2], [False, False, True, True, False]),
        (4, [0, 3], [False, False, True, True]),  # the last round is cut
    ],
)
def test_drafted_tokens(count: int, accepted: list[int], expected: list[bool]) -> None:
    assert drafted_tokens(result(list(range(count)), accepted)) == expected


def test_a_character_belongs_to_the_token_that_completes_it() -> None:
    tokens = list("aé→b".encode())
    assert pieces(ByteTokenizer(), tokens) == ["a", "", "é", "", "", "→", "b"]  # type: ignore[arg-type]
    assert pieces(ByteTokenizer(), tokens[:2]) == ["a", "\ufffd"]  # type: ignore[arg-type]


def test_example_joins_neighbouring_tokens() -> None:
    decoded = result(list(b"abcdef"), [2, 1])
    pair = Pair(torch.tensor([1]), decoded, 1.0, decoded, 1.0)
    messages = [Message("system", "be brief"), Message("user", "hello")]
    example = make_example("mt_bench", messages, pair, ByteTokenizer())  # type: ignore[arg-type]
    runs = [("a", False), ("bc", True), ("d", False), ("e", True), ("f", False)]
    assert example == Example("mt_bench", "hello", runs, tokens=6, forwards=3)
