"""eval/bench.py: interleaving, and exactness of both decoders on a tiny fp64 target."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import eval.bench as bench
from spec_decode.decode import DecodeResult
from spec_decode.drafter import Drafter
from spec_decode.errors import DraftwrightError
from spec_decode.sampling import Sampling
from spec_decode.target_hf import HFTarget
from spec_decode.tree import StaticTree, Tree

PROMPTS = [torch.arange(3, 3 + length) for length in (5, 1, 9, 4)]


class GuessingDraft(Drafter):
    """Proposes a chain: what plain decoding gave, wrong at every third token."""

    def __init__(self, answers: dict[int, list[int]]) -> None:
        super().__init__()
        self.answers = answers  # prompt length -> new tokens

    def bind(self, target: Any) -> None: ...

    def start(self, output: Any, ids: Tensor) -> tuple[int, int]:
        return ids.numel(), 0

    def propose(self, state: tuple[int, int], root: int, plan: Any, *chance: Any) -> Tree:
        length, done = state
        right = self.answers[length][done + 1 : done + 1 + len(plan.branching)]
        guess = [(token + (done + i) % 3 // 2) % 64 for i, token in enumerate(right)]
        return Tree(torch.tensor([root, *guess]), torch.arange(-1, len(guess)))

    def commit(self, state: tuple[int, int], tree: Tree, path: Tensor, output: Any) -> tuple[int, int]:
        return state[0], state[1] + path.numel()


@pytest.fixture(scope="module")
def target() -> HFTarget:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, max_position_embeddings=64, eos_token_id=None, bos_token_id=None, initializer_range=0.3,
    )  # fmt: skip
    return HFTarget(LlamaForCausalLM(config).double(), "tiny")


def measure(target: HFTarget, draft: Drafter, **changes: Any) -> list[bench.Pair]:
    settings: dict[str, Any] = {"tree": StaticTree((1, 1, 1)), "max_new_tokens": 12, "sampling": Sampling()}
    return bench.measure(target, draft, PROMPTS, **(settings | changes))


def test_both_decoders_give_the_same_tokens_at_temperature_0(target: HFTarget) -> None:
    plain = [bench.plain_decode(target, ids, max_new_tokens=12) for ids in PROMPTS]
    draft = GuessingDraft({ids.numel(): result.tokens for ids, result in zip(PROMPTS, plain, strict=True)})
    pairs = measure(target, draft)
    assert [pair.baseline.tokens for pair in pairs] == [result.tokens for result in plain]
    assert [pair.drafted.tokens for pair in pairs] == [result.tokens for result in plain]
    assert all(0 < sum(pair.drafted.accepted) < sum(pair.drafted.offered) for pair in pairs)
    assert all(pair.drafted_seconds > 0 and pair.baseline_seconds > 0 for pair in pairs)


def test_order_swaps_every_other_prompt_and_the_warm_up_is_not_counted(
    target: HFTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, int]] = []
    ticks: list[None] = []

    def fake(name: str) -> Any:
        def decode(*args: Any, generator: torch.Generator, **_: Any) -> DecodeResult:
            calls.append((name, args[-1].numel()))
            return DecodeResult([generator.initial_seed()], [], [], 0.0, 0.0, 0.0)

        return decode

    monkeypatch.setattr(bench, "plain_decode", fake("plain"))
    monkeypatch.setattr(bench, "speculative_decode", fake("draft"))
    pairs = measure(target, GuessingDraft({}), seed=7, advance=lambda: ticks.append(None))
    assert calls == [
        ("plain", 5), ("draft", 5),  # warm-up
        ("plain", 5), ("draft", 5), ("draft", 1), ("plain", 1), ("plain", 9), ("draft", 9), ("draft", 4), ("plain", 4),
    ]  # fmt: skip
    assert len(ticks) == 4
    assert [(pair.baseline.tokens, pair.drafted.tokens) for pair in pairs] == [([s], [s]) for s in (7, 8, 9, 10)]


def test_empty_benchmark_and_too_long_prompt_are_errors() -> None:
    bench.check_lengths("mine", [torch.arange(64)], max_positions=64)
    with pytest.raises(DraftwrightError, match="'mine' has no prompts"):
        bench.check_lengths("mine", [], max_positions=64)
    with pytest.raises(DraftwrightError, match=r"prompt 1 of benchmark 'mine' has 65 tokens .* holds 64"):
        bench.check_lengths("mine", [torch.arange(3), torch.arange(65)], max_positions=64)
