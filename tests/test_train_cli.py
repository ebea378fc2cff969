"""`python -m train` as a person runs it: a whole run on a tiny target, stopping and continuing, and bad input."""

import json
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from spec_decode.drafters import load_draft
from spec_decode.errors import DraftwrightError
from train import run
from train.callbacks import TrainingStopped
from train.cli import main
from train.leviathan import LeviathanModule
from train.provenance import git_commit


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, make_world: Callable[[Path], Path]) -> Path:
    """A folder in which runs are started."""
    return make_world(tmp_path_factory.mktemp("world"))


def _command(*words: str) -> list[str]:
    fixed = ["target=hf", "target.path=target", "target.dtype=float32", "dataset=jsonl", "dataset.path=chats.jsonl"]
    fixed.append("dataset.decontaminate=null")  # the hub isn't asked
    fixed.append("trainer.precision=bf16-mixed")  # the default depends on the machine
    small = ["tokens_per_batch=64", "train_tokens=600", "heldout_tokens=60", "max_length=64", "draft_vocab_size=40"]
    brief = ["epochs=10", "trainer.log_every_n_steps=2", "trainer.val_check_interval=5", "eval.max_new_tokens=4"]
    return [sys.executable, "-m", "train", "+variant=eagle3", *fixed, *small, *brief, "module.steps=2", *words]


def _environment(world: Path) -> dict[str, str]:
    root = Path(__file__).resolve().parent.parent
    return {**os.environ, "PYTHONPATH": str(root), "DRAFTWRIGHT_CACHE": str(world / "cache"), "OMP_NUM_THREADS": "1"}


def _run(world: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=world, env=_environment(world), capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture(scope="module")
def finished(world: Path) -> Path:
    """The output folder of one uninterrupted run."""
    result = _run(world, _command("logger=csv"))
    assert result.returncode == 0, result.stderr[-3000:]
    assert "of the supervised tokens" in result.stdout
    (folder,) = (world / "outputs" / "eagle3").iterdir()
    return folder


def test_run_leaves_draft_metrics_and_report(world: Path, finished: Path) -> None:
    draft = load_draft(finished / "draft")
    assert draft.config.draft_vocab_size == 40
    readme = (finished / "draft" / "README.md").read_text()
    assert "data: jsonl (chats.jsonl)" in readme
    assert "| val/tau |" in readme
    assert "python -m train +variant=eagle3 target=hf" in readme
    assert f"eval checkpoint=FOLDER target=hf target.path={world / 'target'} benchmark=" in readme

    record = json.loads((finished / "run.json").read_text())
    assert record["config"]["draft_vocab_size"] == 40
    assert set(record["versions"]) >= {"python", "torch", "lightning", "transformers"}
    assert record["metrics"]["val/tau"] >= 1.0
    assert record["data"]["source"] == "chats.jsonl"
    assert record["data"]["train"]["conversations"] == 22
    assert record["data"]["train"]["tokens"] == 22 * 28
    assert record["data"]["train"]["supervised_tokens"] == 22 * 13
    assert record["data"]["train"]["covered"] == pytest.approx(187 / 286)
    assert record["data"]["heldout"]["covered"] == pytest.approx(6 / 39)
    assert record["data"]["dropped_rows"] == {"no answered user turn": 1}
    assert "heldout" in (finished / "csv" / "hparams.yaml").read_text()

    header = (finished / "csv" / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"train/loss", "train/lr", "train/grad_norm", "train/tokens_per_s", "val/loss", "val/tau"} <= set(header)
    report = json.loads((finished / "eval" / "report.json").read_text())
    assert report["training_seconds"] == record["training_seconds"] > 0
    assert not (finished / "train.log").exists()


def test_stopped_and_continued_run_gives_the_same_draft(world: Path, finished: Path) -> None:
    stopped, resumed = world / "outputs" / "a stopped run", world / "outputs" / "resumed"
    always = ["logger=none", "eval.enabled=false"]
    process = subprocess.Popen(
        _command(*always, f"output_dir={stopped}", "checkpoint_minutes=0"),  # 0: a checkpoint after every batch
        cwd=world,
        env=_environment(world),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None and not (stopped / "last.ckpt").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 143, errors[-3000:]
    assert not (stopped / "draft").exists()
    last = errors.strip().splitlines()[-1]
    assert "stopped by SIGTERM after step" in last
    command = shlex.split(last.partition("continue with: ")[2])
    assert command[:4] == ["python", "-m", "train", "+variant=eagle3"]
    assert command[-1] == f"ckpt_path={stopped / 'last.ckpt'}"

    result = _run(world, _command(*always, f"output_dir={resumed}", "ckpt_path=last"))
    assert result.returncode == 0, result.stderr[-3000:]
    before = torch.load(stopped / "last.ckpt", weights_only=True)["callbacks"]["TrainingTime"]["seconds"]
    assert json.loads((resumed / "run.json").read_text())["training_seconds"] > before > 0
    ours, theirs = (load_file(folder / "draft" / "model.safetensors") for folder in (resumed, finished))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


BAD = {
    "no variant": ([], r"choose a variant with \+variant=NAME, where NAME is one of: .*eagle3"),
    "unknown variant": (["+variant=eagle9"], "there is no variant 'eagle9'; choose from: .*eagle3"),
    "two variants": (["+variant=[eagle3,eagle3]"], "several variants were given at once"),
    "unknown key": (["+variant=eagle3", "sede=1"], "there is no config key 'sede'"),
    "unknown nested key": (["+variant=eagle3", "eval.limits=1"], "there is no config key 'eval.limits'"),
    "added key": (["+variant=eagle3", "+sede=1"], r"'\+sede=1' adds a key that nothing reads"),
    "added section": (["+variant=eagle3", "+foo.bar=1"], "there is no config key 'foo'"),
    "unknown key of the target": (["+variant=eagle3", "+target.foo=1"], "there is no config key 'target.foo'"),
    "unknown option": (["+variant=eagle3", "target=huge"], "there is no target 'huge'; choose from: hf, "),
    "missing value": (["+variant=eagle3", "target=hf"], "'target.path' has no value: pass target.path="),
    "no checkpoint": (["+variant=eagle3", "ckpt_path=x.ckpt"], "checkpoint x.ckpt is missing or damaged"),
    "nothing to continue": (["+variant=eagle3", "ckpt_path=last", "output_dir=a/b"], "finds no last.ckpt"),
    "occupied folder": (
        ["+variant=eagle3", "output_dir=chats.jsonl/x"],
        "could not write to chats.jsonl.* choose another output_dir=",
    ),
    "unknown verb": (["fitt"], "there is no verb 'fitt'; choose from: fit"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence(
    world: Path, case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, expected = BAD[case]
    monkeypatch.chdir(world)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setattr(sys, "argv", ["train", *words])
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # Hydra's would outlive the captured stream
    with pytest.raises(SystemExit) as ended:
        main()
    text = capsys.readouterr().err
    assert ended.value.code == 2
    assert len(text.strip().splitlines()) == 1
    assert re.search(expected, text)


UNUSABLE = {
    "a missing file": (None, "nothing.jsonl"),
    "an empty file": ("", "chats.jsonl"),
    "no row that can be used": ('{"text": "x"}\n{"messages": 3}\n', "chats.jsonl"),
    "no answers": ('{"messages": [{"role": "user", "content": "w1 w2"}]}\n' * 3, "chats.jsonl"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_unusable_data_is_one_sentence(
    world: Path, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    content, name = UNUSABLE[case]
    if content is not None:
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(world)
    words = [
        "+variant=eagle3",
        *_command("logger=none", f"dataset.path={tmp_path / name}", f"output_dir={tmp_path}")[4:],
    ]
    monkeypatch.setattr(sys, "argv", ["train", *words])
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    with pytest.raises(SystemExit) as ended:
        main()
    text = capsys.readouterr().err
    assert ended.value.code == 2
    assert "Traceback" not in text
    assert text.splitlines()[-1].startswith("train: ")
    assert str(tmp_path / name) in text.splitlines()[-1]


@pytest.fixture(scope="module")
def composed(world: Path) -> DictConfig:
    """The config of `_command`, with absolute paths."""
    return _composed(world, "eagle3")


def _composed(world: Path, variant: str) -> DictConfig:
    words = [
        word.replace("=target", f"={world}/target").replace("=chats", f"={world}/chats") for word in _command()[4:]
    ]
    words = ["target=hf" if word.startswith("target=") else word for word in words]
    with initialize_config_module("conf", version_base="1.3"):
        return compose("train", overrides=[f"+variant={variant}", *words, "logger=none", f"cache_dir={world}/cache"])


def _changed(composed: DictConfig, *words: str) -> DictConfig:
    """The composed config with overrides, which may add keys."""
    cfg = composed.copy()
    OmegaConf.set_struct(cfg, False)
    for word in words:
        override = OverridesParser.create().parse_override(word)
        OmegaConf.update(cfg, override.key_or_group, override.value())
    return cfg


class Opened(Exception):
    """The target was opened, where the slow work begins."""


WRONG = {
    "epochs=0": "epochs=0 .* a whole number of at least 1",
    "epochs=-1": "epochs=-1 .* a whole number of at least 1",
    "max_steps=0": "max_steps=0 .* null or a whole number of at least 1",
    "max_steps=-1": "max_steps=-1 ",
    "tokens_per_batch=0": "tokens_per_batch=0 ",
    "tokens_per_batch=-5": "tokens_per_batch=-5 ",
    "seed=abc": "seed=abc .* a whole number from 0 to 4294967295",
    "seed=-1": "seed=-1 ",
    "vocabulary_tokens=null": "vocabulary_tokens=null .* a whole number of at least 1",
    "train_tokens=abc": "train_tokens=abc ",
    "heldout_tokens=-1": "heldout_tokens=-1 ",
    "max_length=abc": "max_length=abc .* a whole number of at least 2",
    "draft_vocab_size=abc": "draft_vocab_size=abc ",
    "draft_vocab_size=0": "draft_vocab_size=0 ",
    "checkpoint_minutes=abc": "checkpoint_minutes=abc .* a number of at least 0",
    "features=foo": "features=foo .* cache or hybrid or online",
    "output_dir=3": "output_dir=3 .* a path",
    "foo=1": "no config key 'foo'",
    "trainer.val_check_interval=null": "trainer.val_check_interval=null ",
    "trainer.log_every_n_steps=0": "trainer.log_every_n_steps=0 ",
    "trainer.precision=foo": "trainer.precision=foo is not possible: choose 32-true or bf16-mixed",
    "trainer.precision=16-mixed": "trainer.precision=16-mixed is not possible",
    "trainer.foo=1": "unexpected keyword argument 'foo'",
    "trainer.max_epochs=2": "trainer.max_epochs is set by Draftwright",
    "module.steps=0": "module.steps=0 ",
    "module.decay=2": "module.decay=2 .* a number from 0 to 1",
    "module.foo=1": "no config key 'module.foo'",
    "module.optimizer.name=sgd": "module.optimizer.name='sgd' is unknown",
    "module.lr=-1": "module.lr=-1 is not possible: it must be a number of at least 0",
    "module.optimizer.foo=1": "unexpected keyword argument 'foo'",
    "draft.target_layers=5": "draft.target_layers=5 .* a list with at least one entry",
    "draft.target_layers=[]": r"draft.target_layers=\[\] .* a list with at least one entry",
    "draft.fc_norm=maybe": "draft.fc_norm=maybe .* true or false",
    "draft.fusion=xyz": "fusion 'xyz' is unknown",
    "draft.foo=1": "no config key 'draft.foo'",
    "draft.draft_vocab_size=9": "no config key 'draft.draft_vocab_size'",
    "target.device=foo": "target.device=foo but the trainer runs on cpu",
    "target.device=cuda": "target.device=cuda but the trainer runs on cpu",
    "target.dtype=foo": "target.dtype 'foo' is unknown",
    "target.foo=1": "no config key 'target.foo'",
    "dataset.foo=1": "no config key 'dataset.foo'",
    "tree.depth=0": "depth must be at least 1, got 0",
    "tree.depth=abc": "tree.depth=abc .* a whole number",
    "tree.foo=1": "no config key 'tree.foo'",
    "eval.temperature=-1": "eval.temperature=-1 .* a number of at least 0",
    "eval.dtype=foo": "eval.dtype=foo .* float32 or bfloat16",
    "eval.max_new_tokens=0": "eval.max_new_tokens=0 ",
    "eval.limit=abc": "eval.limit=abc ",
    "eval.foo=1": "no config key 'eval.foo'",
}


@pytest.mark.parametrize("word", WRONG)
def test_wrong_values_are_refused_before_the_target_is_opened(
    composed: DictConfig, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "open_target", _raise(Opened()))
    with pytest.raises(DraftwrightError, match=WRONG[word]) as refused:
        run.train(_changed(composed, word))
    assert "\n" not in str(refused.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_gpu_trainer_without_gpu_is_refused(composed: DictConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "open_target", _raise(Opened()))
    with pytest.raises(DraftwrightError, match=r"No supported gpu backend found.* use trainer=cpu"):
        run.train(_changed(composed, "trainer.accelerator=gpu"))


@pytest.mark.parametrize("word", ["trainer.deterministic=true", "train_tokens=null", "target.device=cpu"])
def test_right_values_and_keys_of_lightning_get_as_far_as_the_target(
    composed: DictConfig, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "open_target", _raise(Opened()))
    with pytest.raises(Opened):
        run.train(_changed(composed, word, f"output_dir={tmp_path}"))


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("max_length=257", "max_length=257 exceeds the 256 positions of target"),
        ("draft_vocab_size=65", "draft_vocab_size 65 exceeds the target's vocabulary of 64"),
        ("draft.target_layers=[3,9]", "target layers .* cannot be tapped on a target of 8 layers"),
    ],
)
def test_what_the_target_cannot_do_is_refused_before_the_data(
    composed: DictConfig, word: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.inputs.prepare", _raise(Opened()))
    with pytest.raises(DraftwrightError, match=expected):
        run.train(_changed(composed, word, f"output_dir={tmp_path}"))


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("module.steps=3", "module.steps (2, now 3)"),
        ("module.lr=0.5", "module.lr (0.015, now 0.5)"),
        ("draft.fc_norm=true", "draft.fc_norm (False, now True)"),
        ("draft_vocab_size=41", "draft_vocab_size (40, now 41)"),
        ("trainer.precision=32-true", "trainer.precision (bf16-mixed, now 32-true)"),
        ("target.dtype=bfloat16", "target.dtype (float32, now bfloat16)"),
        ("draft.target_layers=[2,3,4]", "draft.target_layers (None, now [2, 3, 4])"),
        ("features=online", "features (cache, now online)"),
        ("features_dtype=float8", "features_dtype (bfloat16, now float8)"),
    ],
)
def test_continuing_with_other_settings_is_refused(
    composed: DictConfig, finished: Path, word: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.inputs.prepare", _raise(Opened()))
    with pytest.raises(DraftwrightError, match=re.escape(f"was written with another {key}")):
        run.train(_changed(composed, word, f"ckpt_path={finished / 'last.ckpt'}", f"output_dir={tmp_path}"))


def test_zip_that_is_no_checkpoint_is_refused(composed: DictConfig, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.ckpt", "w") as file:
        file.writestr("a", "b")
    torch.save({"state_dict": {}}, tmp_path / "y.ckpt")
    for name in ("x.ckpt", "y.ckpt"):
        with pytest.raises(DraftwrightError, match=f"{name} is no checkpoint of a training run"):
            run.train(_changed(composed, f"ckpt_path={tmp_path / name}"))


def test_interrupted_final_validation_loses_nothing(
    composed: DictConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = _changed(composed, "max_steps=3", "eval.enabled=false")
    with monkeypatch.context() as patched:
        patched.setattr(run.Trainer, "validate", _raise(SystemExit(1)))  # what Lightning makes of a second Ctrl-C
        # Where the last step validates, nothing validates again.
        whole = run.train(_changed(cfg, "trainer.val_check_interval=3", f"output_dir={tmp_path / 'whole'}"))
        with pytest.raises(KeyboardInterrupt):
            run.train(_changed(cfg, "trainer.val_check_interval=2", f"output_dir={tmp_path / 'stopped'}"))
    assert "Not measured." in (tmp_path / "stopped" / "draft" / "README.md").read_text()
    last = tmp_path / "stopped" / "last.ckpt"
    resumed = run.train(_changed(cfg, f"ckpt_path={last}", f"output_dir={tmp_path / 'resumed'}"))
    assert resumed["metrics"] == whole["metrics"]
    assert whole["metrics"].keys() >= {"val/loss", "val/tau"}
    drafts = [load_file(tmp_path / name / "draft" / "model.safetensors") for name in ("whole", "stopped", "resumed")]
    for name, tensor in drafts[0].items():
        assert torch.equal(tensor, drafts[1][name]), name
        assert torch.equal(tensor, drafts[2][name]), name


def test_random_numbers_drawn_before_do_not_change_the_draft(
    composed: DictConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drafts = []
    for name in "ab":
        words = ["max_steps=1", "heldout_tokens=0", f"output_dir={tmp_path / name}"]
        assert run.train(_changed(composed, *words))["eval"] is None
        assert "nothing is held out, so the draft is not decoded" in capsys.readouterr().out
        drafts.append(load_file(tmp_path / name / "draft" / "model.safetensors"))
        opened = run.open_target
        monkeypatch.setattr(run, "open_target", lambda source, opened=opened: (torch.rand(7), opened(source))[1])
    assert all(torch.equal(drafts[0][name], drafts[1][name]) for name in drafts[0])


def test_a_language_model_is_distilled_stopped_and_continued(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = _changed(_composed(world, "leviathan"), "draft_vocab_size=null", "max_steps=4", "eval.limit=2")
    whole = run.train(_changed(cfg, f"output_dir={tmp_path / 'whole'}"))
    assert whole["eval"]["benchmarks"]["held_out"]["differences"] == []
    assert whole["metrics"].keys() >= {"val/loss", "val/tau", "val/acceptance/1"}
    assert whole["metrics"]["val/loss"] == whole["metrics"]["val/loss/0"]
    draft = load_draft(whole["draft"])
    assert (draft.config.draft_vocab_size, draft.config.target) == (64, "target")
    assert AutoModelForCausalLM.from_pretrained(whole["draft"]).config.num_hidden_layers == 2

    def stopping(module: LeviathanModule, *arguments: Any) -> Any:
        if module.global_step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(module, *arguments)

    step, last = LeviathanModule.training_step, tmp_path / "stopped" / "last.ckpt"
    with monkeypatch.context() as patched:
        patched.setattr(LeviathanModule, "training_step", stopping)
        with pytest.raises(TrainingStopped) as stopped:
            run.train(_changed(cfg, f"output_dir={last.parent}"))
    assert stopped.value.step == 2
    resumed = run.train(_changed(cfg, f"ckpt_path={last}", f"output_dir={tmp_path / 'resumed'}"))
    assert resumed["metrics"] == whole["metrics"]
    ours, theirs = (load_file(Path(result["draft"]) / "model.safetensors") for result in (resumed, whole))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_a_language_model_scores_the_whole_vocabulary(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.inputs.prepare", _raise(Opened()))
    with pytest.raises(DraftwrightError, match=r"draft_vocab_size 40 is not possible.* use draft_vocab_size=null"):
        run.train(_composed(world, "leviathan"))


def _raise(error: BaseException) -> Any:
    def call(*_arguments: Any, **_options: Any) -> Any:
        raise error

    return call


def test_status_of_bad_input_reaches_the_shell(world: Path) -> None:
    result = _run(world, [sys.executable, "-m", "train"])
    assert result.returncode == 2
    assert result.stderr.startswith("train: choose a variant with +variant=NAME")


def test_help_names_the_choices(world: Path) -> None:
    result = _run(world, [sys.executable, "-m", "train", "--help"])
    assert result.returncode == 0
    assert re.search("variant: .*eagle3", result.stdout)
    assert "python -m train +variant=eagle3" in result.stdout


def test_commit_is_none_outside_git(tmp_path: Path) -> None:
    assert git_commit(tmp_path) is None
