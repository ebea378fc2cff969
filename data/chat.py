"""Messages -> token ids and loss mask, through the tokenizer's chat template.

For each assistant turn k, with `ids(m, g)` the template's tokens for messages m with or without generation prompt:
    before = ids(m[:k], True)        what the model sees when it has to answer
    after  = ids(m[:k+1], False)     the same with the answer
Everything in `after` behind the common prefix with `before` is supervised, end-of-turn included; nothing else is.
The mask comes from this structure, so template markers inside a text cannot fool it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, takewhile
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from data.messages import Message, UnusableRow
from spec_decode.errors import DraftwrightError


def encode_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], max_length: int, *, ends: bool = True
) -> tuple[list[int], list[bool]]:
    """Token ids and loss mask of one chat, cut behind the last answer that ends within max_length.

    Where no answer ends there, the first one is cut. ends: whether the last answer is complete; else its end-of-turn
    token and what follows are left out. Both lists are empty when no supervised token lies within max_length. Raises
    UnusableRow when the template refuses the chat or leaves out a tool call, and DraftwrightError when there is no
    template or it rewrites earlier turns.
    """
    ids: list[int] = []
    mask: list[bool] = []
    for index, message in enumerate(messages):
        if message.role != "assistant":
            continue
        before = render(tokenizer, messages[:index], generation_prompt=True)
        if len(before) >= max_length:
            break
        after = render(tokenizer, messages[: index + 1], generation_prompt=False)
        if before[: len(ids)] != ids or after[: len(ids)] != ids:
            raise DraftwrightError(
                "the chat template of this target changes earlier turns when later ones are added, so a chat of "
                "several turns has no single token sequence: pass a tokenizer whose template leaves earlier turns alone"
            )
        if ids and len(after) > max_length:
            break
        start = common_prefix(before, after)
        if not all(call["function"]["name"] in tokenizer.decode(after[start:]) for call in message.tool_calls):
            raise UnusableRow("tool call that the chat template leaves out")
        mask += [False] * (start - len(mask)) + [True] * (len(after) - start)
        ids = after
        if not ends and index == len(messages) - 1:
            mask = mask[: len(ids) - _behind_answer(tokenizer, messages, ids)]
    mask = mask[:max_length]
    length = len(mask) - mask[::-1].index(True) if True in mask else 0
    return ids[:length], mask[:length]


def encode_pieces(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], max_length: int, *, ends: bool, split: bool
) -> Iterator[tuple[int, list[int], list[bool]]]:
    """(index of the first turn, ids, mask) of a chat as `encode_chat` cuts it; with `split`, also of what is behind.

    Each piece begins with the system turn and a user turn, and holds a supervised token. Errors as in `encode_chat`.
    """
    system = list(takewhile(lambda message: message.role == "system", messages))
    start = len(system)
    while start < len(messages):
        ids, mask = encode_chat(tokenizer, [*system, *messages[start:]], max_length, ends=ends)
        if ids:
            yield start, ids, mask
        if not split:
            return
        taken = max(1, sum(supervised for supervised, _ in groupby(mask)))  # each answer is one run
        answers = [index for index in range(start, len(messages)) if messages[index].role == "assistant"]
        behind = range(answers[taken - 1] + 1, len(messages))
        start = next((index for index in behind if messages[index].role == "user"), len(messages))


def _behind_answer(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], ids: list[int]) -> int:
    """Number of tokens that the template puts behind the last answer: those that it puts behind any other, too."""
    others = (
        render(tokenizer, [*messages[:-1], Message("assistant", text)], generation_prompt=False) for text in ("a", "1")
    )
    return min(common_prefix(ids[::-1], other[::-1]) for other in others)


def encode_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """Token ids of a prompt, ready for the model's answer."""
    return render(tokenizer, messages, generation_prompt=True)


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, generation_prompt: bool) -> list[int]:
    """The template's token ids for these messages. Errors as in `encode_chat`."""
    if not tokenizer.chat_template:
        raise DraftwrightError(
            f"the tokenizer of '{tokenizer.name_or_path}' has no chat template: pass a chat model as target, "
            "or put a chat_template.jinja beside its tokenizer.json"
        )
    try:
        ids = tokenizer.apply_chat_template(
            [_as_template_takes(message) for message in messages],
            tokenize=True,
            add_generation_prompt=generation_prompt,
            return_dict=False,
            tokenizer_kwargs={"verbose": False},  # no warning about model_max_length: we cut
        )
    except TemplateError as error:
        raise UnusableRow(f"refused by the chat template: {str(error)[:80]}") from error
    return list(ids)  # type: ignore[arg-type]


def _as_template_takes(message: Message) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        turn["tool_calls"] = list(message.tool_calls)
    if message.reasoning:
        turn["reasoning_content"] = message.reasoning
    return turn


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading tokens that two sequences share."""
    return next((index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
