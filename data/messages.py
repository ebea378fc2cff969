"""One row of a chat data set -> a list of messages that alternate between user and assistant.

Schemas are recognised row by row, because real files mix them: ShareGPT (`conversations` of from/value), hybrids
with role/content, `messages`, UltraChat (`data`, a list of strings), MT-Bench-101 (`history`), Alpaca and Dolly
(`instruction`, …), and a bare list of messages. A row that cannot be used raises UnusableRow.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

_ROLES = {
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard"), "assistant"),
    "system": "system",
}
_NUMBERED_HUMAN = re.compile(r"human_\d+")


@dataclass(frozen=True)
class Message:
    """One turn of a chat; role is `system`, `user` or `assistant`."""

    role: str
    content: str


class UnusableRow(Exception):
    """A row that is dropped; the message is a short reason that is equal for equal causes, so it can be counted."""


def parse_row(row: object) -> list[Message]:
    """The usable part of one row: an optional system turn, then user and assistant in turn, ending with assistant.

    An assistant turn at the start is dropped (ShareGPT chunks begin with one), an empty turn cuts the chat there,
    and unanswered user turns at the end are trimmed. Raises UnusableRow when no assistant turn is left, and for
    roles, types and orders that have no safe reading.
    """
    given = [turn for turn in _turns(row) if turn.role != "system" or turn.content.strip()]
    turns = list(takewhile(lambda turn: turn.content.strip(), given))
    cut = len(turns) < len(given)
    if turns and turns[0].role == "system":
        system, turns = turns[:1], turns[1:]
    else:
        system = _row_system(row)
    if turns and turns[0].role == "assistant":
        turns = turns[1:]
    while turns and turns[-1].role == "user":
        turns.pop()
    if not turns:
        raise UnusableRow(
            "empty conversation" if not given else "empty turn before any answer" if cut else "no answered user turn"
        )
    for index, turn in enumerate(turns):
        if turn.role == "system":
            raise UnusableRow("system turn in the middle")
        if turn.role != ("user", "assistant")[index % 2]:
            raise UnusableRow("two turns of the same role in a row")
    return system + turns


def parse_prompt(messages: object) -> list[Message]:
    """The turns of a message list that come before its first assistant turn; UnusableRow when there are none."""
    prompt: list[Message] = []
    for message in _chat(messages):
        if message.role == "assistant":
            break
        prompt.append(message)
    if not any(message.role == "user" and message.content.strip() for message in prompt):
        raise UnusableRow("no user turn")
    return prompt


def _turns(row: object) -> Iterable[Message]:
    if isinstance(row, list):
        return _chat(row)
    if not isinstance(row, dict):
        raise UnusableRow("row is not an object")
    for key in ("messages", "conversations", "conversation"):
        if row.get(key) is not None:
            return _chat(row[key])
    if row.get("data") is not None:
        return _ultrachat(row["data"])
    if row.get("history") is not None:
        return _pairs(row["history"], "user", "bot")
    if row.get("instruction") is not None:
        return _instruction(row)
    raise UnusableRow("no known conversation field")


def _chat(turns: object) -> Iterable[Message]:
    if not isinstance(turns, list):
        raise UnusableRow("conversation is not a list")
    if turns and isinstance(turns[0], dict) and "input" in turns[0] and "output" in turns[0]:
        yield from _pairs(turns, "input", "output")
        return
    for turn in turns:
        if not isinstance(turn, dict):
            raise UnusableRow("turn is not an object")
        role = turn.get("role", turn.get("from"))
        if role is None:
            raise UnusableRow("turn without a role")
        if "content" not in turn and "value" not in turn:
            raise UnusableRow("turn without text")
        yield Message(_role(role), _text(turn.get("content", turn.get("value"))))


def _ultrachat(turns: object) -> Iterable[Message]:
    if not isinstance(turns, list):
        raise UnusableRow("conversation is not a list")
    for index, turn in enumerate(turns):
        yield Message(("user", "assistant")[index % 2], _text(turn))


def _pairs(turns: object, user: str, assistant: str) -> Iterable[Message]:
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise UnusableRow("conversation is not a list of objects")
    for turn in turns:
        yield Message("user", _text(turn.get(user)))
        yield Message("assistant", _text(turn.get(assistant)))


def _instruction(row: dict[str, Any]) -> Iterable[Message]:
    """Alpaca (input, output) and Dolly (context, response)."""
    context = _text(row.get("input", row.get("context")))
    instruction = _text(row["instruction"])
    yield Message("user", f"{instruction}\n\n{context}" if context.strip() else instruction)
    yield Message("assistant", _text(row.get("output", row.get("response"))))


def _role(name: object) -> str:
    known = str(name).strip().lower()
    if _NUMBERED_HUMAN.fullmatch(known):
        return "user"
    if known not in _ROLES:
        raise UnusableRow(f"unknown role '{str(name)[:30]}'")
    return _ROLES[known]


def _text(value: object) -> str:
    """A string, or the joined texts of a list of text parts; null counts as empty."""
    if value is None:
        return ""
    if isinstance(value, list):
        value = "".join(_part(part) for part in value)
    if not isinstance(value, str):
        raise UnusableRow(f"text is of type {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, legal in JSON but not in a tokenizer
        raise UnusableRow("text with half a character") from error
    return value


def _part(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict):
        for key in ("text", "value"):
            if isinstance(part.get(key), str):
                return part[key]
    raise UnusableRow("content part that is not text")


def _row_system(row: object) -> list[Message]:
    """A system prompt that stands beside the conversation, as in NeMo and LLaMA-Factory files."""
    system = row.get("system") if isinstance(row, dict) else None
    return [Message("system", system)] if isinstance(system, str) and system.strip() else []
