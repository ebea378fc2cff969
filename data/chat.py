"""Messages -> token ids and loss mask, through the tokenizer's chat template.

For each assistant turn k, with `ids(m, g)` the template's tokens for messages m with or without generation prompt:
    before = ids(m[:k], True)        what the model sees when it has to answer
    after  = ids(m[:k+1], False)     the same with the answer
Everything in `after` behind the common prefix with `before` is supervised, end-of-turn included; nothing else is.
The mask comes from this structure, so template markers inside a text cannot fool it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from data.messages import Message, UnusableRow
from spec_decode.errors import DraftwrightError


def encode_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], max_length: int, *, ends: bool = True
) -> tuple[list[int], list[bool]]:
    """Token ids and loss mask of one chat, cut to max_length and then behind the last supervised token.

    ends: whether the last answer is complete; else its end-of-turn token and what follows are left out. Both lists are
    empty when no supervised token lies within max_length. Raises UnusableRow when the template refuses the chat, and
    DraftwrightError when there is no template or it rewrites earlier turns.
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
        start = common_prefix(before, after)
        mask += [False] * (start - len(mask)) + [True] * (len(after) - start)
        ids = after
        if not ends and index == len(messages) - 1:
            mask = mask[: len(ids) - _behind_answer(tokenizer, messages, ids)]
    mask = mask[:max_length]
    length = len(mask) - mask[::-1].index(True) if True in mask else 0
    return ids[:length], mask[:length]


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
    chat: list[dict[str, Any]] = [{"role": message.role, "content": message.content} for message in messages]
    try:
        ids = tokenizer.apply_chat_template(
            chat,
            tokenize=True,
            add_generation_prompt=generation_prompt,
            return_dict=False,
            tokenizer_kwargs={"verbose": False},  # no warning about model_max_length: we cut
        )
    except TemplateError as error:
        raise UnusableRow(f"refused by the chat template: {str(error)[:80]}") from error
    return list(ids)  # type: ignore[arg-type]


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading tokens that two sequences share."""
    return next((index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
