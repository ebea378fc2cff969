"""`python -m data prepare` on files as users have them: good rows are kept, bad ones counted, nothing ends in a trace.

Each file imitates a shape that users of other trainers have reported.
"""

import json

import pytest

from data import cli

GOOD = {"id": "ok", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}


def sharegpt(*turns):
    return {"conversations": [{"from": role, "value": text} for role, text in turns]}


def chat(*turns):
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def call(**turn):
    return {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", **turn}]}


CASES = {  # rows or bytes; kept; {reason: (count, first)}
    "first turn is gpt": (
        [sharegpt(("gpt", "x"), ("human", "r"), ("gpt", "b")), sharegpt(("gpt", "x"))],
        1,
        {"no answered user turn": (1, "line 2")},
    ),
    "same role twice": (
        [
            sharegpt(("human", "x"), ("human", "y"), ("gpt", "b")),
            chat(("user", "x"), ("assistant", "b"), ("user", "c")),
        ],
        1,
        {"two turns of the same role in a row": (1, "line 1")},
    ),
    "empty lists": (
        [{"conversations": []}, {"messages": []}, {"data": []}],
        0,
        {"empty conversation": (3, "line 1")},
    ),
    "blank turns": (
        [
            sharegpt(("human", " \n\t"), ("gpt", "b")),
            sharegpt(("human", "x"), ("gpt", "b"), ("human", ""), ("gpt", "c")),
        ],
        1,
        {"empty turn before any answer": (1, "line 1")},
    ),
    "system only": (
        [chat(("system", "x")), sharegpt(("system", "x"))],
        0,
        {"no answered user turn": (2, "line 1")},
    ),
    "roles": (
        [
            *(sharegpt((role, role), ("gpt", "b")) for role in ("User", "human_1", "prompter", "hummany")),
            *(sharegpt(("human", role), (role, "b")) for role in ("chatgpt", "bing", "bard", "Assistant")),
        ],
        7,
        {"unknown role 'hummany'": (1, "line 4")},
    ),
    "missing keys": (
        [
            {"id": "x"},
            {"conversations": [{"value": "x"}]},
            {"conversations": [{"from": "human"}]},
            {"conversations": None},
            {"conversations": [None]},
        ],
        0,
        {
            "no known conversation field": (2, "line 1"),
            "turn without a role": (1, "line 2"),
            "turn without text": (1, "line 3"),
            "turn is not an object": (1, "line 5"),
        },
    ),
    "wrong types": (
        [
            sharegpt(("human", None), ("gpt", "b")),
            sharegpt(("human", 42), ("gpt", "b")),
            chat(("user", [{"type": "text", "text": "parts"}]), ("assistant", [{"type": "text", "value": "b"}])),
            {"instruction": "x", "input": "y", "output": {"k": None}},
            {"data": "not a list"},
        ],
        1,
        {
            "empty turn before any answer": (1, "line 1"),
            "text is of type int": (1, "line 2"),
            "text is of type dict": (1, "line 4"),
            "conversation is not a list": (1, "line 5"),
        },
    ),
    "not UTF-8": (
        b'{"messages": [{"role": "user", "content": "caf\xe9 \x87"}]}\n' + json.dumps(GOOD).encode(),
        1,
        {"line is not UTF-8": (1, "line 1")},
    ),
    "garbage": (
        b'no json\n{"conversations":[],}\n{"score":NaN,"data":["x","b"]}\n\xef\xbb\xbf\n{"conversations":[{"fr',
        1,
        {"line is not JSON": (4, "line 1")},
    ),
    "array": (json.dumps([GOOD, {"prompt": "x"}], indent=2).encode(), 1, {"no answered user turn": (1, "row 2")}),
    "template markers in a text": (
        [sharegpt(("human", "<|im_end|>?"), ("gpt", "<|im_end|>\n<|im_start|>user\nx"))],
        1,
        {},
    ),
    "UltraChat": (
        [{"data": ["x", "b", "odd"]}, {"prompt": "x", **chat(("system", "s"), ("user", "y"), ("assistant", "b"))}],
        2,
        {},
    ),
    "tools that the template doesn't know": (
        [
            sharegpt(("human", "x"), ("function_call", '{"name": "f"}'), ("observation", "4"), ("gpt", "b")),
            call(content=None, tool_calls=[{"function": {"name": "add", "arguments": "{}"}}]),
            call(content="", reasoning_content="r", tool_calls=[{"function": {"name": "add", "arguments": {}}}]),
            call(content=None, tool_calls=[{}]),
        ],
        0,
        {
            "tool call that the chat template leaves out": (3, "line 1"),
            "tool call without a name": (1, "line 4"),
        },
    ),
    "mixed schemas": (
        [
            GOOD,
            chat(("user", "x"), ("assistant", "b")),
            {"data": ["y", "b"]},
            {"instruction": "z", "input": "", "output": "b"},
            {"conversation": [{"input": "u", "output": "b"}]},
            {"text": "### Human: x### Assistant: b"},
            {"history": [{"user": "v", "bot": "b"}]},
        ],
        6,
        {"no known conversation field": (1, "line 6")},
    ),
}


@pytest.fixture
def prepare(monkeypatch, tmp_path, tokenizer, capsys):
    """prepare(content, *words): `python -m data prepare`; what it printed, and the summary, None for a mistake."""
    monkeypatch.setattr(cli, "open_tokenizer", lambda source: tokenizer)
    monkeypatch.chdir(tmp_path)

    def run(content, *words):
        whole = content if isinstance(content, bytes) else "\n".join(map(json.dumps, content)).encode()
        (tmp_path / "chats.jsonl").write_bytes(whole)
        fixed = ["target=hf", "target.path=x", "dataset=jsonl", "dataset.path=chats.jsonl", "cache_dir=cache"]
        monkeypatch.setattr("sys.argv", ["data", "prepare", *fixed, "dataset.decontaminate=null", *words])
        try:
            cli.main()
        except SystemExit:
            return capsys.readouterr().err, None
        (file,) = (tmp_path / "cache" / "prepared").glob("*/*.json")
        return capsys.readouterr().out, json.loads(file.read_text())

    return run


@pytest.mark.parametrize("case", CASES)
def test_good_rows_are_kept_and_bad_ones_counted(prepare, case):
    content, kept, dropped = CASES[case]
    printed, summary = prepare(content)
    if not kept:
        (line,) = printed.splitlines()
        assert line.startswith("data: chats.jsonl holds no usable conversation (")
        for reason, (count, first) in dropped.items():
            assert f"{count} × {reason} ({first}" in line
        return
    found = {reason: (entry["rows"], entry["first"]) for reason, entry in summary["dropped"].items()}
    assert (summary["conversations"], found) == (kept, dropped)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (
            [GOOD, sharegpt(("human", "x"), ("hummany", "b"))],
            "line 2, key 'conversations[1].from': unknown role 'hummany'",
        ),
        ([GOOD, {"messages": []}], "line 2, key 'messages': empty conversation"),
        ([GOOD, 7], "line 2: row is not an object"),
        ([GOOD, call(content="", tool_calls=[{"name": "f"}])], "line 2: tool call that the chat template leaves out"),
    ],
)
def test_strict_names_file_row_and_key(prepare, rows, sentence):
    printed, _ = prepare(rows, "dataset.strict=true")
    assert printed == f"data: chats.jsonl, {sentence}; correct or remove it, or use dataset.strict=false\n"


def test_the_summary_says_what_is_in_the_data(prepare):
    rows = [
        GOOD,
        GOOD,
        chat(("user", "x"), ("assistant", "b"), ("user", "y"), ("assistant", "c" * 40)),
        {"messages": []},
    ]
    printed, summary = prepare(rows)
    del summary["warnings"], summary["tokenizer"]
    assert summary == {
        "source": "chats.jsonl",
        "max_length": 512,
        "rows": 4,
        "conversations": 2,
        "sequences": 2,
        "turns": 6,
        "tokens": 8 + 1 + 13 + 1 + 8 + 1 + 13 + 1 + 8 + 1 + 13 + 40,  # one for each byte, and those of the template
        "supervised_tokens": 1 + 2 + 1 + 2 + 40 + 2,
        "lengths_up_to": {"32": 1, "128": 1},
        "dropped": {
            "copy of an earlier chat": {"rows": 1, "first": "line 2"},
            "empty conversation": {"rows": 1, "first": "line 4"},
        },
    }
    assert "4 rows, 2 conversations kept in 2 sequences\n" in printed
    assert "dropped: 1 × empty conversation, first line 4\n" in printed
