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

    def load_dataset(name, config, *, split):
        calls.append((name, config, split))
        return [{"prompt": ["first", "second"]}, {"prompt": ["other", "x"]}]

    monkeypatch.setattr("data.sources.HfApi.dataset_info", lambda *_args, **_kwargs: None)
    monkeypatch.setattr("data.sources.datasets.load_dataset", load_dataset)
    assert load_prompts("mt_bench", None, 1) == [user("first")]
    assert calls == [("HuggingFaceH4/mt_bench_prompts", None, "train")]


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_unreachable_hub_is_one_sentence(monkeypatch, benchmark):
    def unreachable(*_args, **_kwargs):
        raise ConnectionError("no route")

    monkeypatch.setattr("data.sources.HfApi.dataset_info", unreachable)
    monkeypatch.setattr("data.sources.datasets.load_dataset", lambda *_, **__: pytest.fail("would retry for long"))
    get = f"`hf download {BENCHMARKS[benchmark].hub} --repo-type dataset --local-dir FOLDER`"
    with pytest.raises(DraftwrightError, match=rf"could not be read \(ConnectionError\).* {get} .* pass path=FOLDER"):
        load_prompts(benchmark, None, None)


def test_a_folder_with_a_copy_of_the_hubs_data_set(tmp_path, monkeypatch):
    monkeypatch.setattr("data.sources.datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("data.sources.HfApi.dataset_info", lambda *_args, **_kwargs: pytest.fail("asked the hub"))
    (tmp_path / "copy" / "main").mkdir(parents=True)
    (tmp_path / "copy" / "main" / "test.jsonl").write_text('{"question": "1 + 1?"}\n{"question": "2 + 2?"}\n')
    front = "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: test\n    path: main/test*\n---\n"
    (tmp_path / "copy" / "README.md").write_text(front)
    assert load_prompts("gsm8k", str(tmp_path / "copy"), 1) == [user("1 + 1?")]
    with pytest.raises(DraftwrightError, match="is not a file"):
        load_prompts("file", str(tmp_path / "copy"))
