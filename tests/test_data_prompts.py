import json

import pytest

from data.messages import Message
from data.prompts import BENCHMARKS, load_prompts
from spec_decode.errors import DraftwrightError


def write(tmp_path, *rows):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(path)


def user(text):
    return [Message("user", text)]


def test_fields_and_limit(tmp_path):
    messages = [{"role": role, "content": text} for role, text in [("system", "s"), ("user", "c"), ("assistant", "x")]]
    path = write(tmp_path, {"turns": ["a", "later"]}, {"prompt": "b"}, {"messages": messages}, {"prompt": messages})
    with_system = [Message("system", "s"), Message("user", "c")]
    assert load_prompts("file", path, None) == [user("a"), user("b"), with_system, with_system]
    assert load_prompts("mt_bench", path, 2) == [user("a"), user("b")]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{oops", "row 2: is not JSON"),
        ({"question": "q"}, "row 2: has none of the fields turns, messages, prompt"),
        ({"turns": [7]}, "row 2: text is of type int"),
        ({"prompt": " "}, "row 2: no user turn"),
        ({"messages": [{"role": "wizard", "content": "q"}]}, "row 2: unknown role 'wizard'"),
    ],
)
def test_bad_rows_are_named(tmp_path, bad, message):
    with pytest.raises(DraftwrightError, match=message):
        load_prompts("file", write(tmp_path, {"prompt": "a"}, bad), None)


def test_user_mistakes(tmp_path):
    with pytest.raises(DraftwrightError, match="choose from mt_bench, humaneval, gsm8k, math500, mbpp, or file"):
        load_prompts("mtbench", None, None)
    with pytest.raises(DraftwrightError, match="pass path="):
        load_prompts("file", None, None)
    with pytest.raises(DraftwrightError, match="does not exist"):
        load_prompts("file", str(tmp_path / "no.jsonl"), None)
    with pytest.raises(DraftwrightError, match="limit=0"):
        load_prompts("file", write(tmp_path, {"prompt": "a"}), 0)
    with pytest.raises(DraftwrightError, match="there is no prompt in"):
        load_prompts("file", write(tmp_path, "", ""), None)


def test_hub_rows(monkeypatch):
    calls = []

    def load_dataset(name, config, split):
        calls.append((name, config, split))
        return [{"prompt": ["first", "second"]}, {"prompt": ["other", "x"]}]

    monkeypatch.setattr("data.prompts.datasets.load_dataset", load_dataset)
    assert load_prompts("mt_bench", None, 1) == [user("first")]
    assert calls == [("HuggingFaceH4/mt_bench_prompts", None, "train")]


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_unreachable_hub_is_one_sentence(monkeypatch, benchmark):
    def load_dataset(*_args, **_kwargs):
        raise ConnectionError("no route")

    monkeypatch.setattr("data.prompts.datasets.load_dataset", load_dataset)
    with pytest.raises(DraftwrightError, match=r"could not be loaded from the hub \(ConnectionError\)"):
        load_prompts(benchmark, None, None)
