"""One row of a chat data set -> a list of messages that alternate between user and assistant.

Schemas are recognised row by row, because real files mix them: ShareGPT (`conversations` of from/value), hybrids
with role/content, `messages`, UltraChat (`data`, a list of strings), MT-Bench-101 (`history`), Alpaca and Dolly
(`instruction`, …), a bare list of messages, and prompts alone (`turns`, `prompt`, `question`). A row that cannot be
used raises UnusableRow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import dropwhile, takewhile
from typing import Any

_ROLES = {
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation"), "tool"),
    "system": "system",
}
_NUMBERED_HUMAN = re.compile(r"human_\d+")
_FOLLOWERS = {"user": ("assistant",), "assistant": ("user", "tool"), "tool": ("tool", "assistant")}
# Rows of one question: its field, those that may stand below it, those of the answer.
_SINGLE = (
    ("instruction", ("input", "context"), ("output", "response")),
    ("prompt", (), ("completion", "response")),
    ("question", (), ("answer",)),
)


@dataclass(frozen=True)
class Message:
    """One turn of a chat; role is `system`, `user`, `assistant` or `tool`. tool_calls: what an assistant turn calls, as
    chat templates take it; reasoning: what the assistant wrote before its answer."""

    role: str
    content: str
    tool_calls: tuple[dict[str, Any], ...] = ()
    reasoning: str = ""

    def empty(self) -> bool:
        """Whether nothing was said."""
        return not (self.content.strip() or self.tool_calls)


class UnusableRow(Exception):
    """A row that is dropped; the message is a short reason that is equal for equal causes, so it can be counted.

    key: what is wrong in the row, like `messages[2].content`.
    """

    def __init__(self, reason: str, key: str = "") -> None:
        super().__init__(reason)
        self.key = key


def parse_row(row: object) -> list[Message]:
    """The usable part of one row: an optional system turn, then user and assistant in turn, ending with assistant.

    Between two assistant turns there may be tool turns. Assistant turns at the start are dropped (ShareGPT chunks begin
    with one), an empty turn cuts the chat there, and unanswered turns at the end are trimmed. Raises UnusableRow when
    no assistant turn is left, and for roles, types and orders that have no safe reading.
    """
    key, given = _given(row)
    system, turns = _until_empty(row, given)
    while turns and turns[-1].role != "assistant":
        turns.pop()
    if not turns:
        cut = any(turn.empty() for turn in given)
        raise UnusableRow(
            "empty conversation" if not given else "empty turn before any answer" if cut else "no answered user turn",
            key,
        )
    _check_order(turns, key)
    return system + turns


def parse_questions(row: object) -> list[Message]:
    """The system and user turns of one row, answered or not: what a target is asked that answers them itself.

    Raises UnusableRow as `parse_row` does, and for tool turns, which no target can answer.
    """
    key, given = _given(row)
    system, turns = _until_empty(row, given)
    if any(turn.role == "tool" for turn in turns):
        raise UnusableRow("tool turn", key)
    if any(turn.role != "user" for turn in turns):
        _check_order(turns, key)
    if not turns:
        raise UnusableRow("no user turn" if given else "empty conversation", key)
    return system + [turn for turn in turns if turn.role == "user"]


def parse_prompt(messages: object) -> list[Message]:
    """The turns of a message list that come before its first assistant turn; UnusableRow when there are none."""
    prompt = list(takewhile(lambda message: message.role != "assistant", _chat(messages, "messages")))
    if not any(message.role == "user" and message.content.strip() for message in prompt):
        raise UnusableRow("no user turn")
    return prompt


def _given(row: object) -> tuple[str, list[Message]]:
    """The field that holds the conversation, and its turns."""
    key, turns = _turns(row)
    return key, [turn for turn in turns if turn.role != "system" or turn.content.strip()]


def _until_empty(row: object, given: list[Message]) -> tuple[list[Message], list[Message]]:
    """The system turn, and the turns from the first question to the last before an empty one."""
    turns = list(takewhile(lambda turn: not turn.empty(), given))
    system = turns[:1] if turns and turns[0].role == "system" else []
    answers = ("assistant", "tool")
    return system or _row_system(row), list(dropwhile(lambda turn: turn.role in answers, turns[len(system) :]))


def _check_order(turns: list[Message], key: str) -> None:
    previous = "assistant"
    for turn in turns:
        if turn.role == "system":
            raise UnusableRow("system turn in the middle", key)
        if turn.role == previous != "tool":
            raise UnusableRow("two turns of the same role in a row", key)
        if turn.role not in _FOLLOWERS[previous]:
            raise UnusableRow(f"{turn.role} turn after a {previous} turn", key)
        previous = turn.role


def _turns(row: object) -> tuple[str, Iterable[Message]]:
    if isinstance(row, list):
        return "messages", _chat(row, "messages")
    if not isinstance(row, dict):
        raise UnusableRow("row is not an object")
    for key in ("messages", "conversations", "conversation"):
        if row.get(key) is not None:
            return key, _chat(row[key], key)
    if row.get("data") is not None:
        return "data", _ultrachat(row["data"], "data")
    if row.get("history") is not None:
        return "history", _pairs(row["history"], "user", "bot", "history")
    if row.get("turns") is not None:
        return "turns", _questions(row["turns"], "turns")
    for key, below, answers in _SINGLE:
        if isinstance(row.get(key), list):
            return key, _chat(row[key], key)
        if row.get(key) is not None:
            return key, _single(row, key, below, answers)
    raise UnusableRow("no known conversation field", "messages")


def _chat(turns: object, key: str) -> Iterator[Message]:
    if not isinstance(turns, list):
        raise UnusableRow("conversation is not a list", key)
    if turns and isinstance(turns[0], dict) and "input" in turns[0] and "output" in turns[0]:
        yield from _pairs(turns, "input", "output", key)
        return
    for index, turn in enumerate(turns):
        yield _message(turn, f"{key}[{index}]")


def _message(turn: object, key: str) -> Message:
    if not isinstance(turn, dict):
        raise UnusableRow("turn is not an object", key)
    given = turn.get("role", turn.get("from"))
    if given is None:
        raise UnusableRow("turn without a role", key)
    field = "content" if "content" in turn else "value"
    if field not in turn and not turn.get("tool_calls"):
        raise UnusableRow("turn without text", key)
    role = _role(given, f"{key}.{'role' if 'role' in turn else 'from'}")
    content = turn.get(field)
    key = f"{key}.{field}"
    if str(given).strip().lower() == "function_call":
        return Message(role, "", _calls(_json(content, key), key))
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    calls = [_json(part.get("value"), key) for part in parts if part.get("type") == "tool_call"]
    thoughts = [part.get("value") for part in parts if part.get("type") == "reasoning"]
    return Message(
        role,
        _text(content, key),
        _calls(turn.get("tool_calls") or calls, key),
        _text(turn.get("reasoning_content") or thoughts, key),
    )


def _calls(calls: object, key: str) -> tuple[dict[str, Any], ...]:
    """Tool calls in the form of chat templates, the arguments as an object where they are one."""
    found = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UnusableRow("tool call without a name", key)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            with suppress(ValueError):  # else as the model wrote it
                arguments = json.loads(arguments)
        found.append({"type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return tuple(found)


def _json(text: object, key: str) -> Any:
    try:
        return json.loads(_text(text, key))
    except (ValueError, RecursionError) as error:
        raise UnusableRow("tool call that is not JSON", key) from error


def _ultrachat(turns: object, key: str) -> Iterator[Message]:
    if not isinstance(turns, list):
        raise UnusableRow("conversation is not a list", key)
    for index, turn in enumerate(turns):
        yield Message(("user", "assistant")[index % 2], _text(turn, f"{key}[{index}]"))


def _questions(turns: object, key: str) -> Iterator[Message]:
    if not isinstance(turns, list):
        raise UnusableRow("conversation is not a list", key)
    for index, turn in enumerate(turns):
        yield Message("user", _text(turn, f"{key}[{index}]"))


def _pairs(turns: object, user: str, assistant: str, key: str) -> Iterator[Message]:
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise UnusableRow("conversation is not a list of objects", key)
    for index, turn in enumerate(turns):
        yield Message("user", _text(turn.get(user), f"{key}[{index}].{user}"))
        yield Message("assistant", _text(turn.get(assistant), f"{key}[{index}].{assistant}"))


def _single(row: dict[str, Any], asked: str, below: Iterable[str], answers: Iterable[str]) -> Iterator[Message]:
    """One question, with or without an answer: Alpaca (input, output), Dolly (context, response), prompts."""
    question = _text(row[asked], asked)
    context = "".join(_text(row.get(key), key) for key in below)
    yield Message("user", f"{question}\n\n{context}" if context.strip() else question)
    for key in answers:
        if row.get(key) is not None:
            yield Message("assistant", _text(row[key], key))
            return


def _role(name: object, key: str) -> str:
    known = str(name).strip().lower()
    if _NUMBERED_HUMAN.fullmatch(known):
        return "user"
    if known not in _ROLES:
        raise UnusableRow(f"unknown role '{str(name)[:30]}'", key)
    return _ROLES[known]


def _text(value: object, key: str) -> str:
    """A string, or the joined texts of a list of text parts; null counts as empty."""
    if value is None:
        return ""
    if isinstance(value, list):
        value = "".join(_part(part, key) for part in value)
    if not isinstance(value, str):
        raise UnusableRow(f"text is of type {type(value).__name__}", key)
    try:
        value.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, legal in JSON but not in a tokenizer
        raise UnusableRow("text with half a character", key) from error
    return value


def _part(part: object, key: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict):
        if part.get("type") in ("reasoning", "tool_call"):  # `_message` takes them
            return ""
        for name in ("text", "value"):
            if isinstance(part.get(name), str):
                return part[name]
    raise UnusableRow("content part that is not text", key)


def _row_system(row: object) -> list[Message]:
    """A system prompt that stands beside the conversation, as in NeMo and LLaMA-Factory files."""
    system = row.get("system") if isinstance(row, dict) else None
    return [Message("system", system)] if isinstance(system, str) and system.strip() else []
