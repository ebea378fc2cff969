"""`python -m eval compare`: the table and the page of several reports, which folders it takes, and what it refuses."""

from __future__ import annotations

import io
import json
import logging
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from eval.cli import main, with_folders
from eval.compare import COLUMNS, Row, best_first, cells, differences, find_reports, read_rows, show, tell_apart
from eval.compare_page import page
from eval.report import tree_sizes


def numbers(**changes: Any) -> dict[str, Any]:
    values = {
        "tau": 1.83, "speedup": 1.214, "speedup_ci": [1.15, 1.26], "tokens_per_s": 22.3, "baseline_tokens_per_s": 18.4,
        "acceptance_by_position": [0.46, 0.424], "accept_length_histogram": [48, 25, 11], "draft_s_per_round": 0.0091,
        "verify_s_per_round": 0.0625, "identical": True, "prompts": 16, "new_tokens": 1024, "differences": [],
    }  # fmt: skip
    return values | changes


def report(environment: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    place = {"cpu": "EPYC", "device": "cpu", "threads": 2, "dtype": "float32", "max_new_tokens": 64, "top_k": 0,
             "top_p": 1.0, "seed": 0}  # fmt: skip
    values = {
        "target": "Tiny", "draft": "eagle3", "draft_parameters": 12_345_678, "training_seconds": 5123.4,
        "temperature": 0.0, "tree": {"kind": "static", "branching": [4, 2], "siblings": "top_k"},
        "acceptance": "exact", "environment": place | (environment or {}), "benchmarks": {"mt_bench": numbers()},
    }  # fmt: skip
    return values | changes


def write(folder: Path, inside: str = "report.json", **changes: Any) -> Path:
    """The folder, with a report in it."""
    path = folder / inside
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(report(**changes)))
    return folder


def read(*folders: Path) -> list[Row]:
    found = find_reports(folders)
    return best_first(tell_apart([row for path, folder in found.items() for row in read_rows(path, folder)]))


def run_compare(monkeypatch: pytest.MonkeyPatch, *words: object) -> dict[str, Any]:
    """What compare.json holds after the command."""
    monkeypatch.setattr("sys.argv", ["eval", "compare", *map(str, words), "output_dir=out"])
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # Hydra's would outlive the captured stream
    main()
    return json.loads(Path("out/compare.json").read_text())


def test_a_row_as_text(tmp_path: Path) -> None:
    (row,) = read(write(tmp_path / "a"))
    assert dict(zip(COLUMNS, cells(row), strict=True)) == {
        "benchmark": "mt_bench", "draft": "eagle3", "τ": "1.83", "speedup": "1.21×", "95%": "1.15–1.26",
        "accepted %": "46 42", "params": "12.3M", "draft ms": "9.1", "verify ms": "62.5", "train s": "5,123",
        "tree": "static branching 4-2",
    }  # fmt: skip


def test_what_was_not_measured_is_a_dash(tmp_path: Path) -> None:
    nothing = numbers(tau=None, speedup_ci=None, acceptance_by_position=[])
    (row,) = read(write(tmp_path / "a", benchmarks={"x": nothing}, draft_parameters=999_999, training_seconds=None))
    assert cells(row)[2:] == ["–", "1.21×", "–", "–", "999,999", "9.1", "62.5", "–", "static branching 4-2"]
    older = report()
    del older["draft_parameters"], older["training_seconds"]
    (tmp_path / "a/report.json").write_text(json.dumps(older))
    (row,) = read(tmp_path / "a")
    assert (row.draft_parameters, row.training_seconds) == (None, None)


def test_trees_in_words() -> None:
    assert tree_sizes({"kind": "dynamic", "depth": 4, "top_k": 8, "nodes": 24, "siblings": "top_k"}) == (
        "depth 4, top_k 8, nodes 24"
    )
    assert tree_sizes({"kind": "sparse", "paths": [[0], [1], [0, 0]], "siblings": "top_k"}) == "nodes 4"
    assert tree_sizes({"kind": "static", "branching": (2, 1), "siblings": "independent"}) == (
        "branching 2-1, siblings independent"
    )


def test_table_is_sorted_by_tau_within_each_benchmark(tmp_path: Path) -> None:
    taus = {"slow": (1.5, 2.5), "fast": (2.5, 1.5), "none": (None, 2.0)}
    for name, (first, second) in taus.items():
        measured = {"mt_bench": numbers(tau=first), "[b]": numbers(tau=second)}
        write(tmp_path / name, draft=name, benchmarks=measured)
    rows = read(*(tmp_path / name for name in taus))
    assert [(row.benchmark, row.draft) for row in rows] == [
        ("mt_bench", "fast"), ("mt_bench", "slow"), ("mt_bench", "none"),
        ("[b]", "slow"), ("[b]", "none"), ("[b]", "fast"),
    ]  # fmt: skip
    shown = io.StringIO()
    show(rows, ["Not comparable: dtype differs"], Console(file=shown, width=80))
    lines = [line.rstrip() for line in shown.getvalue().splitlines()]
    assert [line.split()[0] for line in lines if line and "4-2" not in line][3:] == [
        "mt_bench", "fast", "slow", "none", "[b]", "slow", "none", "fast", "Not"
    ]  # fmt: skip
    assert any(
        re.match(r"fast +2\.50 +1\.21× +1\.15–1\.26 +46 42 +12\.3M +9\.1 +62\.5 +5,123 static", x) for x in lines
    )


def test_folders_of_all_three_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = write(tmp_path / "trained", "eval/report.json")
    measured = write(tmp_path / "eval", draft="mine")  # a folder of that name is no training run's
    for job in (10, 9, 1):
        write(tmp_path / f"sweep/{job}", "eval/report.json", draft="hydra")
    (tmp_path / "sweep/multirun.yaml").touch()
    reports = find_reports([trained, measured, tmp_path / "sweep"])
    assert [str(folder.relative_to(tmp_path)) for folder in reports.values()] == [
        "trained", "eval", "sweep/1", "sweep/9", "sweep/10"
    ]  # fmt: skip
    assert find_reports([*sorted((tmp_path / "sweep").iterdir()), tmp_path / "sweep/9"]).keys() == (
        find_reports([tmp_path / "sweep"]).keys()
    )
    monkeypatch.chdir(tmp_path)
    content = run_compare(monkeypatch, "trained", "eval", "sweep")
    assert content["remarks"] == []
    assert [row["draft"] for row in content["rows"]] == ["eagle3", "mine", "hydra (1)", "hydra (9)", "hydra (10)"]
    row = content["rows"][0]
    assert {key: row[key] for key in ("tau", "draft_parameters", "training_seconds", "folder")} == {
        "tau": 1.83, "draft_parameters": 12_345_678, "training_seconds": 5123.4, "folder": str(trained)
    }  # fmt: skip
    assert row["tree"] == {"kind": "static", "branching": [4, 2], "siblings": "top_k"}
    assert sorted(path.name for path in Path("out").iterdir()) == ["compare.html", "compare.json"]


def test_drafts_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    folders = [write(tmp_path / place) for place in ("x/1/a", "x/2/a")] + [write(tmp_path / "y", draft="other")]
    assert [row.draft for row in read(*folders)] == ["eagle3 (1/a)", "eagle3 (2/a)", "other"]


def test_what_makes_rows_incomparable_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"mt_bench": numbers(), "gsm8k": numbers(prompts=80)}
    write(tmp_path / "a", draft="a", benchmarks=more)
    write(tmp_path / "b", draft="b", benchmarks=more | {"gsm8k": numbers()}, target="Other",
          environment={"dtype": "bfloat16"})  # fmt: skip
    write(tmp_path / "c", draft="c", temperature=1.0, acceptance={"lossy_typical": {"epsilon": 0.09, "delta": 0.3}},
          environment={"max_new_tokens": 128, "threads": 1})  # fmt: skip
    monkeypatch.chdir(tmp_path)
    content = run_compare(monkeypatch, "a", "b", "c")
    assert content["remarks"] == [
        "LOSSY typical acceptance: the output does not have the target's distribution: c",
        "Not comparable: target differs: Tiny (a, c); Other (b)",
        "Not comparable: dtype differs: float32 (a, c); bfloat16 (b)",
        "Not comparable: temperature differs: 0.0 (a, b); 1.0 (c)",
        "Not comparable: acceptance differs: exact (a, b); lossy_typical epsilon 0.09, delta 0.3 (c)",
        "Not comparable: max new tokens differs: 64 (a, b); 128 (c)",
        "Not comparable: hardware differs: EPYC, 2 threads (a, b); EPYC, 1 thread (c)",
        "Not comparable: benchmarks differ: gsm8k was not measured for c",
        "Not comparable: number of prompts of gsm8k differs: 80 (a); 16 (b)",
    ]
    text = Path("out/compare.html").read_text()
    assert all(remark.replace("'", "&#x27;") in text for remark in content["remarks"])
    assert run_compare(monkeypatch, "a", "c", "benchmark=gsm8k")["remarks"] == [
        "Not comparable: benchmarks differ: gsm8k was not measured for c"
    ]


def test_equal_conditions_need_no_remark(tmp_path: Path) -> None:
    rows = read(write(tmp_path / "a", draft="a"), write(tmp_path / "b", draft="b", tree={"kind": "chain"}))
    assert differences(rows, ["a", "b"]) == []


def test_benchmark_narrows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    write(tmp_path / "a", benchmarks={"mt_bench": numbers(), "gsm8k": numbers()})
    monkeypatch.chdir(tmp_path)
    assert [row["benchmark"] for row in run_compare(monkeypatch, "a", "benchmark=gsm8k")["rows"]] == ["gsm8k"]
    told = failure(monkeypatch, capsys, "a", "benchmark=mbpp")
    assert told == "eval: no draft was measured on benchmark 'mbpp': choose from mt_bench, gsm8k"


def failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, *words: object) -> str:
    """The one sentence with which the command ends."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        run_compare(monkeypatch, *words)
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


WRITTEN = "pass those that python -m train or python -m eval wrote"
MISTAKES = {
    "nothing": ([], f"no folder is given: {WRITTEN}, as in python -m eval compare FOLDER FOLDER"),
    "an empty list": (
        ["folders=[]"],
        "folders=[] is not possible: it must be null or a list with at least one entry, each a path",
    ),
    "a missing folder": (["good", "nowhere"], f"there is no folder 'nowhere': {WRITTEN}"),
    "a missing folder with =": (["no/lr=1"], f"there is no folder 'no/lr=1': {WRITTEN}"),
    "a file": (["good/report.json"], "'good/report.json' is a file: pass the folder that it lies in"),
    "a folder of nothing": (
        ["empty"],
        "'empty' holds no report: make one with python -m eval checkpoint=DRAFT output_dir=empty/eval",
    ),
    "a run without a report": (
        ["my run"],
        "'my run' holds no report: make one with python -m eval 'checkpoint=my run/draft' 'output_dir=my run/eval'",
    ),
    "a draft": (
        ["my run/draft"],
        "'my run/draft' holds no report: make one with python -m eval "
        "'checkpoint=my run/draft' 'output_dir=my run/draft/eval'",
    ),
    "words and a list": (
        ["good", "folders=[good]"],
        "folders are given both as words and as folders=[…]: give all of them in one way",
    ),
    "an unknown key": (["good", "sort=tau"], "there is no config key 'sort'; python -m eval --cfg job shows all keys"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_one_sentence(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("good"))
    Path("empty").mkdir()
    Path("my run/draft").mkdir(parents=True)
    Path("my run/draft/config.json").touch()
    words, sentence = MISTAKES[case]
    assert failure(monkeypatch, capsys, *words) == f"eval: {sentence}"


DAMAGED = {
    "half a file": (json.dumps(report())[:100], "Unterminated string"),
    "not a report": ("[1]", "list indices must be integers"),
    "no environment": (json.dumps({"benchmarks": {"x": numbers()}}), "it lacks 'environment'"),
    "no speedup": (json.dumps(report(benchmarks={"x": {"speedup_ci": None, "tau": 1.5}})), "it lacks 'speedup'"),
    "text for a number": (json.dumps(report(benchmarks={"x": numbers(tau="1.8")})), '"1.8" is no number'),
    "no number": (json.dumps(report(training_seconds=float("nan"))), "NaN is no number"),
    "no benchmark": (json.dumps(report(benchmarks={})), "it has no benchmarks"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_reports_are_one_sentence(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    content, why = DAMAGED[case]
    path = write(Path("run"), "eval/report.json") / "eval/report.json"
    (tmp_path / "run/draft").mkdir()
    (tmp_path / "run/draft/config.json").touch()
    path.write_text(content)
    told = failure(monkeypatch, capsys, "run")
    assert told.startswith(f"eval: {tmp_path / path} is no report that can be read ({why}")
    assert told.endswith(
        f"write it again with python -m eval checkpoint={tmp_path}/run/draft output_dir={tmp_path}/run/eval"
    )


ODD = [
    "a b",
    "a,b",
    "lr=0.1,seed=2",
    "it's",
    'say "hi"',
    "back\\slash",
    "ends\\",
    "${oc.env:HOME}",
    "[x]{y}",
    "7",
    "é:#",
]


def test_odd_paths_reach_the_verb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ODD:
        write(Path(name), draft=name)
    content = run_compare(monkeypatch, *ODD)
    assert [row["folder"] for row in content["rows"]] == [str(tmp_path / name) for name in ODD]
    content = run_compare(monkeypatch, 'folders=[a b,"it\'s"]')
    assert [row["draft"] for row in content["rows"]] == ["a b", "it's"]


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "a")
    assert [row["draft"] for row in run_compare(monkeypatch, "~/a")["rows"]] == ["eagle3"]


def test_words_become_one_override(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    start = ["eval", "compare"]
    assert with_folders([*start, "x", "benchmark=b", "y/"]) == [*start, "folders=['x','y/']", "benchmark=b"]
    assert with_folders([*start, "x", "--cfg", "job"]) == [*start, "folders=['x']", "--cfg", "job"]
    for unchanged in (["--help"], ["--cfg", "job"], ["folders=[x]", "output_dir=o"], ["+a.b=1"]):
        assert with_folders([*start, *unchanged]) == [*start, *unchanged]
    assert with_folders(["eval", "toy", "x"]) == ["eval", "toy", "x"]
    Path("lr=1").mkdir()
    assert with_folders([*start, "lr=1", "lr=2"]) == [*start, "folders=['lr=1']", "lr=2"]


def test_page_is_self_contained_and_escapes_names(tmp_path: Path) -> None:
    names = ("<script>alert(1)</script>", "_a $x$ & b")
    rows = read(*(write(tmp_path / str(i), draft=name, target="<T>") for i, name in enumerate(names)))
    text = page(COLUMNS, [cells(row) for row in rows], [asdict(row) for row in rows], ["a < b"])
    assert "<script" not in text
    assert not re.search(r"(?:src|href)=[\"'](?!#)(?!http://www\.w3\.org)", text)
    assert "url(" not in re.sub(r"url\(#\w+\)", "", text)
    assert text.count("<svg") == 2
    assert text.count("&lt;script&gt;alert(1)&lt;/script&gt;") == 4  # table, both plots, list of folders
    assert len(re.findall(r"_a \$x\$ &amp; b</", text)) == 4
    assert "<strong>a &lt; b</strong>" in text
    assert "drafting for &lt;T&gt;" in text
    assert "<h1>2 drafts compared</h1>" in text
    assert "<td>1.83</td><td>1.21×</td><td>1.15–1.26</td><td>46 42</td><td>12.3M</td>" in text
    assert f"<td>{tmp_path / '0'}</td>" in text


def test_many_drafts_on_one_page(tmp_path: Path) -> None:
    names = [f"{'long' * 20}-{i}" for i in range(12)]
    empty = {"x": numbers(tau=None, speedup_ci=None, acceptance_by_position=[])}
    rows = read(*(write(tmp_path / name, draft=name, benchmarks=empty) for name in names))
    text = page(COLUMNS, [cells(row) for row in rows], [asdict(row) for row in rows], [])
    assert "…" + names[-1][-43:] in text


def test_help_names_the_verb(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    for words, expected in (
        (["compare", "--help"], "python -m eval compare FOLDER [FOLDER ...] [key=value ...]"),
        (["--help"], "python -m eval compare | simulate"),
    ):
        monkeypatch.setattr("sys.argv", ["eval", *words])
        with pytest.raises(SystemExit):
            main()
        assert expected in capsys.readouterr().out
