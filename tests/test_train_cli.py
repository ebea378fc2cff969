"""`python -m train` as a person runs it: a whole run on a tiny target, stopping and continuing, and bad input."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from spec_decode.drafters import load_draft
from train.cli import main
from train.provenance import git_commit

WORDS = ["<pad>", "<eos>", "<user>", "<bot>", *(f"w{i}" for i in range(60))]
TEMPLATE = (
    "{% for m in messages %}{{ '<user> ' if m.role == 'user' else '<bot> ' }}{{ m.content }}{{ ' <eos> ' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<bot> ' }}{% endif %}"
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny target and a file of chats, in which runs are started."""
    folder = tmp_path_factory.mktemp("world")
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<user>", "<bot>"]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "target")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        **sizes, num_hidden_layers=8, vocab_size=len(WORDS), max_position_embeddings=256, eos_token_id=1, pad_token_id=0
    )
    LlamaForCausalLM(config).save_pretrained(folder / "target")
    lines = []
    for i in range(60):
        turns = [
            (role, " ".join(f"w{(i * 7 + j * k) % 60}" for j in range(12)))
            for k, role in ((1, "user"), (2, "assistant"))
        ]
        lines.append(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}))
    (folder / "chats.jsonl").write_text("\n".join(lines))
    return folder


def _command(*words: str) -> list[str]:
    fixed = ["target=hf", "target.path=target", "target.dtype=float32", "dataset=jsonl", "dataset.path=chats.jsonl"]
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


def test_run_leaves_draft_metrics_and_report(finished: Path) -> None:
    draft = load_draft(finished / "draft")
    assert draft.config.draft_vocab_size == 40
    readme = (finished / "draft" / "README.md").read_text()
    assert "chats" in readme or "jsonl" in readme
    assert "python -m train +variant=eagle3 target=hf" in readme

    record = json.loads((finished / "run.json").read_text())
    assert record["config"]["draft_vocab_size"] == 40
    assert set(record["versions"]) >= {"python", "torch", "lightning", "transformers"}
    assert record["metrics"]["val/tau"] >= 1.0

    header = (finished / "csv" / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"train/loss", "train/lr", "train/grad_norm", "train/tokens_per_s", "val/loss", "val/tau"} <= set(header)
    assert (finished / "eval" / "report.json").exists()
    assert not (finished / "train.log").exists()


def test_stopped_and_continued_run_gives_the_same_draft(world: Path, finished: Path) -> None:
    stopped, resumed = world / "outputs" / "stopped", world / "outputs" / "resumed"
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
    assert last.endswith(f"ckpt_path={stopped / 'last.ckpt'}")

    result = _run(world, _command(*always, f"output_dir={resumed}", "ckpt_path=last"))
    assert result.returncode == 0, result.stderr[-3000:]
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
    text = f"train: {ended.value.code}" if isinstance(ended.value.code, str) else capsys.readouterr().err
    assert ended.value.code not in (0, None)
    assert len(text.strip().splitlines()) == 1
    assert re.search(expected, text)


def test_status_of_bad_input_reaches_the_shell(world: Path) -> None:
    result = _run(world, [sys.executable, "-m", "train"])
    assert result.returncode == 2
    assert result.stderr.startswith("train: choose a variant with +variant=NAME")


def test_help_names_the_choices(world: Path) -> None:
    result = _run(world, [sys.executable, "-m", "train", "--help"])
    assert result.returncode == 0
    assert "variant: eagle3" in result.stdout
    assert "python -m train +variant=eagle3" in result.stdout


def test_commit_is_none_outside_git(tmp_path: Path) -> None:
    assert git_commit(tmp_path) is None
