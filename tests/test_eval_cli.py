"""`python -m eval` on a tiny fp64 target and an untrained EAGLE-3 draft: the whole report, and every user's mistake."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eval.cli import draft_name, main
from spec_decode.drafters.eagle3 import Eagle3Config, Eagle3Draft
from spec_decode.target_hf import HFTarget, TargetSource, open_tokenizer, tokenizer_fingerprint

LETTERS = "abcdefghijklmnopqrstuvwxyz .:"
TEMPLATE = "{% for m in messages %}{{ m['content'] }}.{% endfor %}{% if add_generation_prompt %}:{% endif %}"


def write_target(folder: Path, letters: str = LETTERS, hidden: int = 32) -> Path:
    """A random Llama in fp64 whose tokens are single letters, with a chat template."""
    vocabulary = {letter: i for i, letter in enumerate(["?", *letters])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="?", chat_template=TEMPLATE).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=64, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=len(vocabulary), max_position_embeddings=48, eos_token_id=None, bos_token_id=None,
        initializer_range=0.3, dtype="float64",
    )  # fmt: skip
    LlamaForCausalLM(config).double().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target/, draft/ and prompts.jsonl."""
    root = tmp_path_factory.mktemp("eval")
    write_target(root / "target")
    target = HFTarget(LlamaForCausalLM.from_pretrained(root / "target"), "tiny")
    fingerprint = tokenizer_fingerprint(open_tokenizer(TargetSource(path=str(root / "target"))))
    torch.manual_seed(1)
    config = Eagle3Config.for_target(target.spec, tokenizer=fingerprint)
    Eagle3Draft(config).save_pretrained(root / "draft")
    prompts = [{"turns": ["tell me a story", "shorter"]}, {"prompt": "what is this"}, {"prompt": "x"}]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    return root


@pytest.fixture
def run_eval(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command in an empty folder; overrides come after sensible ones."""
    monkeypatch.chdir(tmp_path)

    def run(*verb: str, **overrides: Any) -> None:
        values = {
            "checkpoint": folders / "draft", "benchmark": "file", "path": folders / "prompts.jsonl", "target": "hf",
            "target.path": folders / "target", "target.dtype": "float64", "target.device": "cpu", "max_new_tokens": 12,
        } | {key.replace("__", "."): value for key, value in overrides.items()}  # fmt: skip
        monkeypatch.setattr("sys.argv", ["eval", *verb, *(f"{key}={value}" for key, value in values.items())])
        main()

    return run


def test_report_of_a_greedy_run(run_eval: Any, folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run_eval(tree="static")
    (path,) = tmp_path.glob("outputs/eval/*/*/report.json")
    report = json.loads(path.read_text())
    assert set(report) == {
        "target", "draft", "draft_parameters", "training_seconds", "temperature", "tree", "acceptance", "environment",
        "benchmarks", "examples",
    }  # fmt: skip
    assert "".join(text for text, _ in report["examples"][0]["runs"])
    stored = load_file(folders / "draft/model.safetensors")
    assert report["draft_parameters"] == sum(stored[name].numel() for name in stored.keys() - {"d2t", "t2d"})
    assert report["training_seconds"] is None
    assert report["acceptance"] == "exact"
    assert report["tree"] == {"kind": "static", "branching": [4, 3, 2, 2], "siblings": "top_k"}
    assert report["environment"]["dtype"] == "float64"
    assert report["environment"]["command"].startswith("python -m eval checkpoint=")
    numbers = report["benchmarks"]["file"]
    assert set(numbers) == {
        "tau", "speedup", "speedup_ci", "tokens_per_s", "baseline_tokens_per_s", "acceptance_by_position",
        "accept_length_histogram", "draft_s_per_round", "verify_s_per_round", "identical", "prompts", "new_tokens",
        "differences",
    }  # fmt: skip
    assert (numbers["identical"], numbers["differences"]) == (True, [])
    assert (numbers["prompts"], numbers["new_tokens"]) == (3, 36)
    assert 1 <= numbers["tau"] <= 5
    low, high = numbers["speedup_ci"]
    assert 0 < low <= numbers["speedup"] <= high
    assert "<mark>" in (path.with_name("report.html")).read_text()
    shown = capsys.readouterr().out
    assert "report.json" in shown
    assert "report.html" in shown
    assert sorted(file.name for file in path.parent.iterdir()) == ["report.html", "report.json"]


@pytest.mark.parametrize(
    ("record", "expected"),
    [('{"training_seconds": 12.5}', 12.5), ('{"training_seconds": null}', None), ("{}", None), ("half a fi", None)],
)
def test_training_seconds_come_from_the_run_beside_the_draft(
    run_eval: Any, folders: Path, tmp_path: Path, record: str, expected: float | None
) -> None:
    shutil.copytree(folders / "draft", tmp_path / "run/draft")
    (tmp_path / "run/run.json").write_text(record)
    run_eval(checkpoint="run/draft", limit=1, max_new_tokens=2, output_dir="here")
    assert json.loads((tmp_path / "here/report.json").read_text())["training_seconds"] == expected


def test_sampling_several_benchmarks_and_limit(run_eval: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from data.messages import Message

    prompts = [[Message("user", word)] for word in ("one", "two", "three")]
    monkeypatch.setattr("eval.run.load_prompts", lambda name, path, limit: prompts[:limit])
    run_eval(benchmark="[mt_bench,gsm8k]", path="null", limit=2, temperature=1.0, top_k=5, output_dir="here")
    report = json.loads((tmp_path / "here/report.json").read_text())
    assert list(report["benchmarks"]) == ["mt_bench", "gsm8k"]
    assert report["temperature"] == 1.0
    assert report["environment"]["top_k"] == 5
    for numbers in report["benchmarks"].values():
        assert (numbers["identical"], numbers["prompts"], numbers["new_tokens"]) == (None, 2, 24)


def expect_error(run_eval: Any, capsys: pytest.CaptureFixture, *words: str, **overrides: Any) -> None:
    """The run ends with status 2 and one sentence on stderr that contains all words; no report is left."""
    with pytest.raises(SystemExit) as stop:
        run_eval(**overrides)
    assert stop.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("eval: ")]
    assert len(lines) == 1
    assert all(word in lines[0] for word in words), lines[0]
    assert not list(Path.cwd().rglob("report.*"))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"checkpoint": "null"}, ["checkpoint=FOLDER"]),
        ({"checkpoint": "nowhere"}, ["'nowhere' is not a draft folder", "config.json"]),
        ({"benchmark": "mt_bank"}, ["no benchmark 'mt_bank'", "mt_bench, humaneval, gsm8k"]),
        ({"benchmark": "[gsm8k,mbpp]"}, ["one benchmark", "2 are chosen"]),
        ({"path": "missing.jsonl"}, ["missing.jsonl"]),
        ({"path": "empty.jsonl"}, ["empty.jsonl"]),
        ({"path": "long.jsonl"}, ["prompt 1 of benchmark 'file' has 62 tokens", "holds 48"]),
        ({"benchmark": "[]"}, ["benchmark=[]", "a list with at least one entry"]),
        ({"benchmark": "null"}, ["benchmark=null", "text or a list"]),
        ({"limit": "abc"}, ["limit=abc", "null or a whole number of at least 1"]),
        ({"limit": 0}, ["limit=0"]),
        ({"max_new_tokens": 0}, ["max_new_tokens=0", "a whole number of at least 1"]),
        ({"max_new_tokens": "abc"}, ["max_new_tokens=abc"]),
        ({"temperature": -1}, ["temperature=-1", "a number of at least 0"]),
        ({"temperature": "abc"}, ["temperature=abc"]),
        ({"top_p": 0}, ["top_p <= 1"]),
        ({"seed": -1}, ["seed=-1"]),
        ({"tree.depth": 0}, ["depth must be at least 1, got 0"]),
        ({"tree.depth": "abc"}, ["tree.depth=abc", "a whole number"]),
        ({"target.device": "foo"}, ["target.device=foo can't be used here"]),
        ({"target.dtype": "foo"}, ["target.dtype 'foo' is unknown"]),
        ({"target.path": "???"}, ["'target.path' has no value: pass target.path="]),
        ({"+foo": 1}, ["'+foo=1' adds a key that nothing reads"]),
        ({"+target.foo": 1}, ["no config key 'target.foo'"]),
    ],
)
def test_mistakes_end_with_one_sentence(
    run_eval: Any, capsys: pytest.CaptureFixture, overrides: dict[str, Any], words: list[str]
) -> None:
    Path("empty.jsonl").touch()
    Path("long.jsonl").write_text(json.dumps({"prompt": "a"}) + "\n" + json.dumps({"prompt": "a" * 60}) + "\n")
    expect_error(run_eval, capsys, *words, **overrides)


def test_wrong_settings_are_refused_before_the_target_is_opened(
    run_eval: Any, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eval.run.open_target", lambda source: pytest.fail("the target was opened"))
    for overrides in ({"tree.depth": 0}, {"target.device": "foo"}, {"temperature": -1}, {"path": "missing.jsonl"}):
        expect_error(run_eval, capsys, **overrides)


def test_home_is_expanded(
    run_eval: Any, folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folders))
    run_eval(
        checkpoint="~/draft",
        target__path="~/target",
        path="~/prompts.jsonl",
        output_dir="~/out",
        limit=1,
        max_new_tokens=2,
    )
    report = json.loads((folders / "out" / "report.json").read_text())
    assert report["draft"] == f"{folders.parent.name}_{folders.name}"
    assert not list(tmp_path.iterdir())


def test_interrupt_is_one_line(run_eval: Any, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_arguments: Any, **_options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("eval.run.open_target", interrupted)
    with pytest.raises(SystemExit) as stop:
        run_eval()
    assert stop.value.code == 130
    assert capsys.readouterr().err.splitlines() == [
        "eval: interrupted; finished files are kept, and the next run uses them"
    ]


def test_report_is_written_before_the_gaps_are_measured(
    run_eval: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parting = {"prompt": 0, "position": 3, "baseline_token": 1, "token": 2, "logit_gap": None, "near_tie": None}
    monkeypatch.setattr("eval.run.partings", lambda pairs: [parting])

    def full(target: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr("eval.run.at_least_fp32", full)
    with pytest.raises(MemoryError):
        run_eval(output_dir="here")
    report = json.loads((tmp_path / "here/report.json").read_text())
    assert report["benchmarks"]["file"]["differences"] == [parting]
    assert "was not measured" in (tmp_path / "here/report.html").read_text()


def test_fp32_copy_is_made_once_for_all_benchmarks(
    run_eval: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from data.messages import Message

    copies = []
    parting = {"prompt": 0, "position": 3, "baseline_token": 1, "token": 2, "logit_gap": None, "near_tie": None}
    measured = parting | {"logit_gap": 0.0005, "near_tie": True}
    monkeypatch.setattr("eval.run.load_prompts", lambda name, path, limit: [[Message("user", name)]])
    monkeypatch.setattr("eval.run.partings", lambda pairs: [parting])
    monkeypatch.setattr("eval.run.at_least_fp32", lambda target: copies.append(target) or "exact")
    monkeypatch.setattr("eval.run.differences", lambda target, pairs, dtype: [measured] if target == "exact" else [])
    run_eval(benchmark="[a,b]", path="null", output_dir="here")
    report = json.loads((tmp_path / "here/report.json").read_text())
    assert [report["benchmarks"][name]["differences"] for name in "ab"] == [[measured], [measured]]
    assert len(copies) == 1


def test_a_wrong_output_fails_after_the_reports_are_written(
    run_eval: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    parting = {"prompt": 0, "position": 3, "baseline_token": 1, "token": 2, "logit_gap": 0.7, "near_tie": False}
    monkeypatch.setattr("eval.run.partings", lambda pairs: [parting])
    monkeypatch.setattr("eval.run.differences", lambda target, pairs, dtype: [parting])
    with pytest.raises(SystemExit) as stopped:
        run_eval(output_dir="here")
    assert stopped.value.code == 2
    assert "prompt 0 of file leaves plain decoding at token 3 with a logit gap of 0.7" in capsys.readouterr().err
    assert json.loads((tmp_path / "here/report.json").read_text())["benchmarks"]["file"]["differences"] == [parting]


def test_unreadable_prompts(
    run_eval: Any, folders: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(folders / "prompts.jsonl", "locked.jsonl")
    opened = Path.open

    def locked(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self.name == "locked.jsonl":  # chmod would not stop root
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return opened(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", locked)
    expect_error(run_eval, capsys, "locked.jsonl", "Permission denied", path="locked.jsonl")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden": 64}, ["hidden size 32", "has 64"]),
        ({"letters": LETTERS + "!"}, ["tokenizer"]),
        ({"letters": LETTERS[::-1]}, ["tokenizer", "target.path=…"]),
    ],
)
def test_draft_of_another_target(
    run_eval: Any, tmp_path: Path, capsys: pytest.CaptureFixture, changes: dict[str, Any], words: list[str]
) -> None:
    write_target(tmp_path / "other", **changes)
    expect_error(run_eval, capsys, *words, target__path=tmp_path / "other")


def test_draft_of_another_vocabulary(
    run_eval: Any, folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    write_target(tmp_path / "other", letters=LETTERS + "!")
    config = json.loads((folders / "draft/config.json").read_text())
    shutil.copytree(folders / "draft", tmp_path / "draft")
    (tmp_path / "draft/config.json").write_text(json.dumps(config | {"tokenizer": ""}))
    expect_error(
        run_eval, capsys, "vocabulary 30", "has 31", checkpoint=tmp_path / "draft", target__path=tmp_path / "other"
    )


def test_truncated_draft(run_eval: Any, folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    shutil.copytree(folders / "draft", tmp_path / "draft")
    whole = (folders / "draft/model.safetensors").read_bytes()
    (tmp_path / "draft/model.safetensors").write_bytes(whole[: len(whole) // 2])
    expect_error(run_eval, capsys, "model.safetensors", checkpoint=tmp_path / "draft")


def test_draft_name() -> None:
    assert draft_name("outputs/eagle3/2026-11-30_05-00-00/draft") == "eagle3_2026-11-30_05-00-00"
    assert draft_name("/models/my-draft/") == "my-draft"
    assert draft_name(None) == "none"


def test_lossy_acceptance_is_labelled_everywhere(run_eval: Any, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run_eval(acceptance="lossy_typical", temperature=1.0)
    (path,) = tmp_path.glob("outputs/eval/*/*/report.json")
    assert json.loads(path.read_text())["acceptance"] == {"lossy_typical": {"epsilon": 0.09, "delta": 0.3}}
    warning = "LOSSY typical acceptance: the output does not have the target's distribution"
    assert warning in " ".join(capsys.readouterr().out.split())
    assert "LOSSY typical acceptance" in path.with_name("report.html").read_text()


def test_a_dynamic_tree_says_why_it_cannot_draw_siblings(run_eval: Any, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        run_eval(tree="dynamic", tree__siblings="independent")
    assert "it keeps nodes because of their probability" in capsys.readouterr().err


def test_the_tree_file_is_what_eval_takes(run_eval: Any, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run_eval("tune", nodes=12, context=20)
    told = " ".join(capsys.readouterr().out.split())
    assert "share accepted, by depth and rank" in told
    (path,) = tmp_path.glob("outputs/tune/*/*/tree.json")
    assert path.with_name("speedup.svg").read_text().startswith("<svg")
    content = json.loads(path.read_text())
    assert {"paths", "nodes", "expected_tau", "expected_speedup", "acceptance_by_rank", "verify_s"} <= content.keys()
    run_eval(tree=path)
    (report,) = tmp_path.glob("outputs/eval/*/*/report.json")
    tree = json.loads(report.read_text())["tree"]
    assert tree["kind"] == "sparse"
    assert tree["paths"] == content["paths"]


def test_tuning_without_a_round_is_one_sentence(run_eval: Any, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        run_eval("tune", max_new_tokens=1)
    assert "no draft token was ever accepted" in capsys.readouterr().err


def test_lossy_acceptance_needs_a_temperature(run_eval: Any, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        run_eval(acceptance="lossy_typical")
    assert "acceptance=lossy_typical needs a temperature above 0" in capsys.readouterr().err


def test_a_missing_tree_file_is_one_sentence(run_eval: Any, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        run_eval(tree="nothing.json")
    assert "eval: the tree file nothing.json can't be read" in capsys.readouterr().err
