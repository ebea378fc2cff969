import json

import pytest

from data.filters import Contamination, Copies
from data.messages import Message
from data.readers import ReadReport
from data.rows import chosen_rows
from data.sources import Source
from spec_decode.errors import DraftwrightError

WORDS = [f"w{i}" for i in range(100)]


def chat(question, answer="a"):
    return [Message("user", question), Message("assistant", answer)]


def found(kind, *chats):
    copies = Copies(kind)
    return [copies.found(one) for one in chats]


def test_exact_copies_have_the_same_turns():
    same, other = chat("q"), chat("q", "b")
    assert found("exact", same, other, same) == ["", "", "copy of an earlier chat"]
    assert found("none", same, same) == ["", ""]


def test_near_copies_share_most_runs_of_five_words():
    whole = " ".join(WORDS)
    near, half = f"{whole} more".upper(), " ".join([*WORDS[:50], *"abcdefghij" * 5])
    chats = [chat(whole, whole), chat(near, whole), chat(half, half), chat(whole, whole)]
    expected = ["", "near copy of an earlier chat", "", "copy of an earlier chat"]
    assert found("near", *chats) == expected


@pytest.fixture
def benchmark(tmp_path):
    """A file with a short and a long prompt."""
    path = tmp_path / "bench.jsonl"
    path.write_text("\n".join(json.dumps({"turns": [turn]}) for turn in ("Name a river!", " ".join(WORDS[:20]))))
    return str(path)


@pytest.mark.parametrize(
    ("question", "holds"),
    [
        ("name  a river", True),
        ("Please name a river", False),
        (f"Please: {', '.join(WORDS[3:16]).upper()}?", True),
        (" ".join(["please", *WORDS[3:15], "please"]), False),
        ("", False),
    ],
)
def test_prompts_of_a_benchmark(benchmark, question, holds):
    contamination = Contamination([benchmark], ReadReport())
    expected = f"prompt of the benchmark {benchmark}" if holds else ""
    assert contamination.found([*chat("other"), *chat(question)]) == expected
    assert contamination.found(chat("other", question)) == ""


def test_an_unreachable_hub_is_asked_once_and_named_in_one_line(benchmark, monkeypatch):
    asked = []

    def load(name, path=None):
        if path is None:
            asked.append(name)
            raise DraftwrightError("no network")
        return [[Message("user", "name a river")]]

    monkeypatch.setattr("data.filters.load_prompts", load)
    report = ReadReport()
    contamination = Contamination(["mt_bench", benchmark, "gsm8k"], report)
    assert contamination.found(chat("Name a river"))
    assert asked == ["mt_bench"]
    assert report.warnings == [
        "chats were not searched for prompts of mt_bench, gsm8k, since the hub can't be read: pass files with prompts "
        "as dataset.decontaminate=[FILE.jsonl]"
    ]


def test_a_missing_file_is_a_mistake(tmp_path):
    with pytest.raises(DraftwrightError, match="does not exist"):
        Contamination([str(tmp_path / "no.jsonl")], ReadReport())


def test_what_is_left_out_is_counted_with_its_place(tmp_path, benchmark):
    path = tmp_path / "chats.jsonl"
    rows = [{"prompt": question, "completion": "a"} for question in ("x", "Name a river", "y", "x")]
    path.write_text("\n".join(map(json.dumps, rows)))
    source, report = (
        Source("jsonl", path=str(path), strict=True, dedup="exact", decontaminate=(benchmark,)),
        ReadReport(),
    )
    kept = list(chosen_rows(source, report))
    assert [(row.number, row.place, row.messages[0].content) for row in kept] == [
        (0, "line 1", "x"),
        (2, "line 3", "y"),
    ]
    assert report.places == {
        f"prompt of the benchmark {benchmark}": ["line 2"],
        "copy of an earlier chat": ["line 4"],
    }
