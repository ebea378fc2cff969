"""Decoded answers in which every token says who wrote it: the draft (accepted) or the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from transformers import PreTrainedTokenizerBase

from data.messages import Message
from eval.bench import Pair
from spec_decode.decode import DecodeResult

REPLACEMENT = "\ufffd"  # what a tokenizer shows for the first bytes of a character that later tokens complete


@dataclass(frozen=True)
class Example:
    """One prompt and its answer as (text, was drafted) runs; forwards: the target's passes for it, prefill included."""

    benchmark: str
    prompt: str
    runs: list[tuple[str, bool]]
    tokens: int
    forwards: int


def make_example(
    benchmark: str, messages: Sequence[Message], pair: Pair, tokenizer: PreTrainedTokenizerBase
) -> Example:
    """The drafted answer of one measured prompt."""
    result = pair.drafted
    texts = pieces(tokenizer, result.tokens)
    marked = zip(texts, drafted_tokens(result), strict=True)
    runs = [("".join(text for text, _ in group), key) for key, group in groupby(marked, key=lambda piece: piece[1])]
    return Example(benchmark, messages[-1].content, runs, len(result.tokens), result.rounds + 1)


def drafted_tokens(result: DecodeResult) -> list[bool]:
    """Which of the result's tokens were drafted: the prefill gives one of the target's, then each round its
    accepted tokens and one of the target's; the last round may be cut."""
    marks = [False]
    for accepted in result.accepted:
        marks += [True] * accepted + [False]
    return marks[: len(result.tokens)]


def pieces(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> list[str]:
    """The text that each token adds; a character made of several tokens belongs to the one that completes it."""
    texts: list[str] = []
    shown = ""
    for stop in range(1, len(tokens) + 1):
        text = str(tokenizer.decode(list(tokens[:stop])))
        stable = text.rstrip(REPLACEMENT) if stop < len(tokens) else text
        texts.append(stable[len(shown) :])
        shown = max(shown, stable, key=len)
    return texts
