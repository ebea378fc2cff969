import json

import pytest

from data.messages import Message, UnusableRow, parse_prompt, parse_questions, parse_row

Q, A = Message("user", "q"), Message("assistant", "a")
SYSTEM = Message("system", "s")


def sharegpt(*turns):
    return {"conversations": [{"from": role, "value": text} for role, text in turns]}


def chat(*turns):
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        (sharegpt(("human", "q"), ("gpt", "a")), [Q, A]),
        (chat(("system", "s"), ("user", "q"), ("assistant", "a")), [SYSTEM, Q, A]),
        ({"conversations": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}, [Q, A]),
        ({"data": ["q", "a"]}, [Q, A]),
        ([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], [Q, A]),
        ({"history": [{"user": "q", "bot": "a"}]}, [Q, A]),
        ({"conversation": [{"input": "q", "output": "a"}]}, [Q, A]),
        ({"instruction": "q", "input": "", "output": "a"}, [Q, A]),
        ({"instruction": "q", "context": "c", "response": "a"}, [Message("user", "q\n\nc"), A]),
        ({"system": "s", **sharegpt(("User", "q"), ("Assistant", "a"))}, [SYSTEM, Q, A]),
        ({"prompt": "other", **chat(("user", "q"), ("assistant", "a"))}, [Q, A]),
        ({"instruction": "q", "response": "a"}, [Q, A]),
        ({"prompt": "q", "completion": "a"}, [Q, A]),
        ({"question": "q", "answer": "a"}, [Q, A]),
    ],
)
def test_each_schema(row, messages):
    assert parse_row(row) == messages


@pytest.mark.parametrize("role", ["human", "user", "User", "human_1", "prompter"])
def test_user_aliases(role):
    assert parse_row(sharegpt((role, "q"), ("gpt", "a"))) == [Q, A]


@pytest.mark.parametrize("role", ["gpt", "assistant", "chatgpt", "bing", "bard", "Assistant"])
def test_assistant_aliases(role):
    assert parse_row(sharegpt(("human", "q"), (role, "a"))) == [Q, A]


@pytest.mark.parametrize(
    ("turns", "messages"),
    [
        ([("gpt", "x"), ("human", "q"), ("gpt", "a")], [Q, A]),
        ([("system", "s"), ("gpt", "x"), ("human", "q"), ("gpt", "a")], [SYSTEM, Q, A]),
        ([("human", "q"), ("gpt", "a"), ("human", "more")], [Q, A]),
        ([("human", "q"), ("gpt", "a"), ("human", "c"), ("human", "d")], [Q, A]),
        ([("human", "q"), ("gpt", "a"), ("human", " \n"), ("gpt", "b")], [Q, A]),
        ([("human", "q"), ("gpt", "a"), ("human", None), ("gpt", "b")], [Q, A]),
        ([("system", ""), ("human", "q"), ("gpt", "a")], [Q, A]),
        ([("gpt", "x"), ("gpt", "y"), ("human", "q"), ("gpt", "a")], [Q, A]),
        ([("human", "q"), ("gpt", "a"), ("observation", "o")], [Q, A]),
        ([("human", [{"type": "text", "text": "q"}]), ("gpt", [{"type": "text", "value": "a"}])], [Q, A]),
    ],
)
def test_unusable_turns_are_cut(turns, messages):
    assert parse_row(sharegpt(*turns)) == messages


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
CALLED = [Q, Message("assistant", "", (CALL,)), Message("tool", "4"), A]


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", **CALL}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 2}'}}]},
        {"role": "assistant", "content": [{"type": "tool_call", "value": json.dumps(CALL["function"])}]},
        {"from": "function_call", "value": json.dumps(CALL["function"])},
    ],
    ids=["null content", "text arguments", "part", "role"],
)
def test_tool_calls(turn):
    messages = [{"role": "user", "content": "q"}, turn, {"role": "tool", "content": "4"}]
    assert parse_row({"messages": [*messages, {"role": "assistant", "content": "a"}]}) == CALLED


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "assistant", "content": "a", "reasoning_content": "think"},
        {"role": "assistant", "content": [{"type": "reasoning", "value": "think"}, {"type": "text", "value": "a"}]},
    ],
    ids=["key", "part"],
)
def test_reasoning(turn):
    answer = Message("assistant", "a", reasoning="think")
    assert parse_row({"messages": [{"role": "user", "content": "q"}, turn]}) == [Q, answer]


@pytest.mark.parametrize(
    ("row", "questions"),
    [
        ({"prompt": "q"}, [Q]),
        ({"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]}, [SYSTEM, Q]),
        ({"turns": ["q", "r"]}, [Q, Message("user", "r")]),
        ({"question": "q"}, [Q]),
        ({"instruction": "q", "context": "c"}, [Message("user", "q\n\nc")]),
        (chat(("system", "s"), ("user", "q")), [SYSTEM, Q]),
        (sharegpt(("gpt", "x"), ("human", "q"), ("gpt", "a"), ("human", "r")), [Q, Message("user", "r")]),
        ({"data": ["q", "", "r"]}, [Q]),
    ],
)
def test_questions_need_no_answers(row, questions):
    assert parse_questions(row) == questions


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (sharegpt(), "empty conversation"),
        (chat(("system", "s")), "no user turn"),
        (chat(("user", "q"), ("assistant", "a"), ("tool", "o"), ("assistant", "a")), "tool turn"),
        (chat(("user", "q"), ("user", "r"), ("assistant", "a")), "two turns of the same role in a row"),
    ],
)
def test_rows_without_questions(row, reason):
    with pytest.raises(UnusableRow, match=reason):
        parse_questions(row)


@pytest.mark.parametrize(
    ("row", "key"),
    [
        (sharegpt(("human", "q"), ("hummany", "a")), "conversations[1].from"),
        (chat(("user", "q"), ("assistant", 4)), "messages[1].content"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"history": [{"user": 1}]}, "history[0].user"),
        ({"data": "q"}, "data"),
        ({"instruction": "q", "output": {}}, "output"),
        (chat(("user", "q"), ("user", "q"), ("assistant", "a")), "messages"),
        ({}, "messages"),
    ],
)
def test_the_wrong_key_is_named(row, key):
    with pytest.raises(UnusableRow) as error:
        parse_row(row)
    assert error.value.key == key


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (sharegpt(), "empty conversation"),
        (sharegpt(("system", "s")), "no answered user turn"),
        (sharegpt(("gpt", "x")), "no answered user turn"),
        (sharegpt(("human", "q"), ("gpt", "")), "empty turn before any answer"),
        (sharegpt(("hummany", "q"), ("gpt", "a")), "unknown role 'hummany'"),
        (sharegpt(("human", "q"), ("human", "q"), ("gpt", "a")), "two turns of the same role in a row"),
        (sharegpt(("human", "q"), ("gpt", "a"), ("system", "s"), ("gpt", "a")), "system turn in the middle"),
        (sharegpt(("human", 42), ("gpt", "a")), "text is of type int"),
        (sharegpt(("human", [{"type": "image"}]), ("gpt", "a")), "content part that is not text"),
        (sharegpt(("human", "\ud83d"), ("gpt", "a")), "text with half a character"),
        ({"conversations": [{"value": "q"}]}, "turn without a role"),
        ({"conversations": [{"from": "human"}]}, "turn without text"),
        ({"conversations": [None]}, "turn is not an object"),
        ({"conversations": None}, "no known conversation field"),
        (chat(("user", "q"), ("tool", "o"), ("assistant", "a")), "tool turn after a user turn"),
        (sharegpt(("human", "q"), ("function_call", "{")), "tool call that is not JSON"),
        (sharegpt(("human", "q"), ("function_call", "{}")), "tool call without a name"),
        ({"prompt": "q"}, "no answered user turn"),
        ({"data": "q"}, "conversation is not a list"),
        ({"history": ["q"]}, "conversation is not a list of objects"),
        ({"text": "### Human: q"}, "no known conversation field"),
        (7, "row is not an object"),
    ],
)
def test_reasons_for_dropping(row, reason):
    with pytest.raises(UnusableRow) as error:
        parse_row(row)
    assert str(error.value) == reason


def test_prompt_ends_before_the_first_answer():
    turns = chat(("system", "s"), ("user", "q"), ("assistant", "a"), ("user", "r"))["messages"]
    assert parse_prompt(turns) == [SYSTEM, Q]
    with pytest.raises(UnusableRow, match="no user turn"):
        parse_prompt(turns[2:])
