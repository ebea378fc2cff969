"""`python -m train export` and `import` as a person runs them, exports at the end of a run, and init_from."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from httpx import Request, Response
from huggingface_hub.errors import HfHubHTTPError
from safetensors.torch import load_file, save_file

from eval.cli import main as eval_main
from spec_decode.drafters import load_draft
from spec_decode.drafters.dspark import DSparkConfig, DSparkDraft
from spec_decode.drafters.medusa import MedusaConfig, MedusaDraftModel
from spec_decode.drafters.p_eagle import PEagleConfig, PEagleDraft
from spec_decode.target_hf import TargetSource, open_target
from train import importing, publish
from train.cli import main

SMALL = ["target=hf", "target.path=target", "target.dtype=float32"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, make_world: Callable[[Path], Path]) -> Path:
    folder = make_world(tmp_path_factory.mktemp("world"))
    (folder / "target" / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\n# A model\n")
    return folder


@pytest.fixture(autouse=True)
def in_world(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(world)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # Hydra's would outlive the captured stream


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """run(*words): `python -m train` in this process."""

    def call(*words: Any, program: Callable[[], None] = main) -> None:
        monkeypatch.setattr(sys, "argv", ["python -m train", *map(str, words)])
        program()

    return call


@pytest.fixture
def refused(run: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """refused(*words): the one sentence that the command ends with."""

    def call(*words: Any) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            run(*words)
        sentence = capsys.readouterr().err.strip().splitlines()[-1]
        assert ended.value.code == 2
        assert sentence.startswith("train: ")
        return sentence

    return call


@pytest.fixture
def finished(world: Path, train_in: Callable[..., None]) -> Path:
    """The folder of one short run that ended with two exports."""
    folder = world / "finished"
    if not folder.exists():
        train_in(
            world, "+variant=eagle3", "logger=none", f"output_dir={folder}", "export=[vllm,speculators]", "seed=3",
            "eval.limit=2", "module.steps=2",
        )  # fmt: skip
    return folder


def _same(ours: Path, theirs: Path) -> None:
    a, b = (load_file(folder / "model.safetensors") for folder in (ours, theirs))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert json.loads((ours / "config.json").read_text()) == json.loads((theirs / "config.json").read_text())


def test_a_run_ends_with_the_exports_that_it_was_told(finished: Path) -> None:
    assert sorted(folder.name for folder in (finished / "export").iterdir()) == ["speculators", "vllm"]
    for name in ("vllm", "speculators"):
        folder = finished / "export" / name
        assert sorted(file.name for file in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    config = json.loads((finished / "export" / "speculators" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(finished.parent / "target")
    assert config["transformer_layer_config"]["max_position_embeddings"] == 256


def test_card_reports_what_was_trained_and_measured(finished: Path) -> None:
    card = (finished / "export" / "vllm" / "README.md").read_text()
    report = json.loads((finished / "eval" / "report.json").read_text())
    numbers = report["benchmarks"]["held_out"]
    assert "\nlicense: apache-2.0\n" in card.partition("\n---\n")[0]
    assert "data: jsonl (chats.jsonl)" in card
    assert "22 conversations, 616 tokens, 286 of them supervised" in card
    assert "module.steps=2" in card
    assert "+variant=eagle3" in card
    assert f"| held_out | 2 | {numbers['tau']:.2f} | {numbers['speedup']:.2f}" in card
    assert f"vllm serve {finished.parent / 'target'} --speculative-config '" in card
    assert '{"method": "eagle3", "model": "FOLDER", "num_speculative_tokens": 4}' in card
    assert "SGLang, after an export with `format=sglang`" in card
    assert "vllm serve FOLDER" in (finished / "export" / "speculators" / "README.md").read_text()


@pytest.mark.parametrize("name", ["vllm", "sglang", "speculators"])
def test_export_and_import_by_command(
    name: str, finished: Path, run: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("export", f"checkpoint={finished / 'draft'}", f"format={name}", f"out={tmp_path / 'out'}", *SMALL)
    run("import", f"path={tmp_path / 'out'}", f"out={tmp_path / 'back'}")
    said = capsys.readouterr().out
    assert f"Eagle3Draft imported from {name}'s format to {tmp_path / 'back'}" in said
    assert ("embed_tokens.weight was left out" in said) is (name == "speculators")  # the one that repeats them
    _same(finished / "draft", tmp_path / "back")
    assert not list(tmp_path.glob(".*"))


def test_sglang_card(finished: Path, run: Callable[..., None], tmp_path: Path) -> None:
    run("export", f"checkpoint={finished / 'draft'}", "format=sglang", f"out={tmp_path / 'out'}", *SMALL)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "--speculative-algorithm EAGLE3 --speculative-draft-model-path FOLDER" in card
    assert "--speculative-num-steps 4 --speculative-eagle-topk 1 --speculative-num-draft-tokens 5" in card
    assert "vLLM, after an export with `format=vllm`" in card


def test_medusa_goes_through_a_pickle_of_tensors(world: Path, run: Callable[..., None], tmp_path: Path) -> None:
    target, _ = open_target(TargetSource(path=str(world / "target")))
    torch.manual_seed(0)
    draft = MedusaDraftModel(MedusaConfig.for_target(target.spec, num_heads=2))
    draft.save_pretrained(tmp_path / "heads")
    run("export", f"checkpoint={tmp_path / 'heads'}", "format=medusa", f"out={tmp_path / 'out'}", *SMALL)
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "README.md", "config.json", "medusa_lm_head.pt",
    ]  # fmt: skip
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Not measured." in card
    assert "Not recorded." in card
    assert "MedusaModel.from_pretrained(FOLDER)" in card
    run("import", f"path={tmp_path / 'out'}", f"out={tmp_path / 'back'}")
    _same(tmp_path / "heads", tmp_path / "back")
    run("export", f"checkpoint={tmp_path / 'heads'}", "format=vllm", f"out={tmp_path / 'vllm'}", *SMALL)
    card = (tmp_path / "vllm" / "README.md").read_text()
    assert '"method": "medusa", "model": "FOLDER", "num_speculative_tokens": 2' in card


SERVED = {
    "dspark": (DSparkDraft, DSparkConfig, '{"method": "dspark", "model": "FOLDER", "num_speculative_tokens": 5}'),
    "p_eagle": (
        PEagleDraft,
        PEagleConfig,
        '{"method": "eagle3", "model": "FOLDER", "parallel_drafting": true, "num_speculative_tokens": 5}',
    ),
}


@pytest.mark.parametrize("name", SERVED)
def test_drafts_of_one_pass_by_command(name: str, world: Path, run: Callable[..., None], tmp_path: Path) -> None:
    kind, config, command = SERVED[name]
    target, _ = open_target(TargetSource(path=str(world / "target")))
    torch.manual_seed(0)
    draft: Any = kind(config.for_target(target.spec, num_layers=2, num_drafts=5, mask_token=3))
    draft.save_pretrained(tmp_path / "draft")
    run("export", f"checkpoint={tmp_path / 'draft'}", "format=vllm", f"out={tmp_path / 'out'}", *SMALL)
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"# {name} draft for" in card
    assert f"--speculative-config '{command}'" in card
    run("import", f"path={tmp_path / 'out'}", f"out={tmp_path / 'back'}")
    _same(tmp_path / "draft", tmp_path / "back")


def test_an_imported_draft_without_a_known_tokenizer_is_measured(
    finished: Path, run: Callable[..., None], tmp_path: Path
) -> None:
    shutil.copytree(finished / "export" / "vllm", tmp_path / "published")
    config = json.loads((tmp_path / "published" / "config.json").read_text())
    del config["draftwright"]
    (tmp_path / "published" / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "published" / "model.safetensors")
    (tmp_path / "published" / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "published" / "pytorch_model.bin")
    run("import", f"path={tmp_path / 'published'}", f"out={tmp_path / 'draft'}")
    assert load_draft(tmp_path / "draft").config.tokenizer == ""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "w1 w2"}\n')
    run(
        f"checkpoint={tmp_path / 'draft'}", "benchmark=file", f"path={tmp_path / 'prompts.jsonl'}", *SMALL,
        f"output_dir={tmp_path / 'eval'}", "max_new_tokens=6", program=eval_main,
    )  # fmt: skip
    assert json.loads((tmp_path / "eval" / "report.json").read_text())["benchmarks"]["file"]["identical"] is True


def test_wrong_commands_are_one_sentence(finished: Path, refused: Callable[..., str], tmp_path: Path) -> None:
    draft, out = f"checkpoint={finished / 'draft'}", f"out={tmp_path / 'out'}"
    assert "'checkpoint' has no value: pass checkpoint=…" in refused("export", "format=vllm", out, *SMALL)
    assert "format=tgi is not possible: it must be vllm or sglang" in refused(
        "export", draft, "format=tgi", out, *SMALL
    )
    assert "is not a draft folder" in refused("export", "checkpoint=nowhere", "format=vllm", out, *SMALL)
    assert "format=medusa has no place for drafts of the class Eagle3Draft" in refused(
        "export", draft, "format=medusa", out, *SMALL
    )
    full = f"out={finished}"
    assert "is there already: choose a new folder" in refused("export", draft, "format=vllm", full, *SMALL)
    assert "is there already: choose a new folder" in refused("import", f"path={finished}", full)
    assert "could not be loaded" in refused("export", draft, "format=vllm", out, "target=hf", "target.path=none")
    assert "'path' has no value: pass path=…" in refused("import", out)
    assert "a draft of Draftwright already" in refused("import", f"path={finished / 'draft'}", out)
    assert not (tmp_path / "out").exists()


def test_draft_of_another_tokenizer_is_not_exported(
    finished: Path, refused: Callable[..., str], tmp_path: Path
) -> None:
    shutil.copytree(finished / "draft", tmp_path / "draft")
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config | {"tokenizer": "0123"}))
    words = [f"checkpoint={tmp_path / 'draft'}", "format=vllm", f"out={tmp_path / 'out'}", *SMALL]
    assert "was trained with another tokenizer or chat template than that of target" in refused("export", *words)


def test_unreadable_files_are_named(
    finished: Path, refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, words = tmp_path / "published", [f"path={tmp_path / 'published'}", f"out={tmp_path / 'out'}"]
    folder.mkdir()
    assert "config.json can't be read" in refused("import", *words)
    (folder / "config.json").write_text("[]")
    assert "config.json holds no keys" in refused("import", *words)
    shutil.copy(finished / "export" / "vllm" / "config.json", folder)
    (folder / "mask_embedding.pt").touch()
    assert "has mask_embedding.pt, which vLLM reads beside the weights" in refused("import", *words)
    (folder / "mask_embedding.pt").unlink()
    assert "has no weights (*.safetensors, *.bin, *.pt)" in refused("import", *words)
    torch.save({"fc.weight": Path("a class")}, folder / "pytorch_model.bin")
    assert "pytorch_model.bin is truncated, damaged or holds more than tensors" in refused("import", *words)
    torch.save({"fc.weight": 3}, folder / "pytorch_model.bin")
    assert "holds something else than named tensors" in refused("import", *words)
    for name in ("a", "b"):
        save_file({"fc.weight": torch.zeros(1)}, folder / f"{name}.safetensors")
    assert "has the tensor 'fc.weight' in several files" in refused("import", *words)
    (folder / "b.safetensors").write_bytes(b"half")
    assert "b.safetensors is truncated, damaged" in refused("import", *words)
    (folder / "b.safetensors").unlink()
    assert f"{folder} can't be imported: the file lacks the tensor" in refused("import", *words)

    def offline(*_: Any, **__: Any) -> None:
        raise HfHubHTTPError("no network", response=Response(503, request=Request("GET", "https://hub")))

    monkeypatch.setattr(importing, "snapshot_download", offline)
    sentence = refused("import", "path=yuhuili/EAGLE3", words[1])
    assert "path=yuhuili/EAGLE3 is no folder and could not be downloaded (no network)" in sentence


def test_hub_names_are_downloaded(
    finished: Path, run: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {}

    def download(name: str, allow_patterns: list[str]) -> str:
        asked[name] = allow_patterns
        return str(finished / "export" / "vllm")

    monkeypatch.setattr(importing, "snapshot_download", download)
    run("import", "path=org/draft", f"out={tmp_path / 'draft'}")
    assert asked == {"org/draft": ["config.json", "*.safetensors", "*.bin", "*.pt"]}
    _same(finished / "draft", tmp_path / "draft")


class FakeHub:
    """Stands for HfApi: keeps what it was asked for."""

    calls: ClassVar[list[tuple[str, dict[str, Any]]]] = []

    def create_repo(self, name: str, **options: Any) -> None:
        if name == "org/forbidden":
            raise HfHubHTTPError("403 Forbidden", response=Response(403, request=Request("POST", "https://hub")))
        self.calls.append((name, options))

    def upload_folder(self, **options: Any) -> None:
        files = sorted(file.name for file in Path(options["folder_path"]).iterdir())
        self.calls.append((options["repo_id"], {"files": files}))


def test_push_to_hub(
    finished: Path,
    run: Callable[..., None],
    refused: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publish, "HfApi", FakeHub)
    words = ["export", f"checkpoint={finished / 'draft'}", "format=vllm", *SMALL]
    run(*words, f"out={tmp_path / 'a'}", "push_to_hub=org/draft")
    files = ["README.md", "config.json", "model.safetensors"]
    assert FakeHub.calls == [("org/draft", {"exist_ok": True}), ("org/draft", {"files": files})]
    sentence = refused(*words, f"out={tmp_path / 'b'}", "push_to_hub=org/forbidden")
    assert "push_to_hub=org/forbidden failed (403 Forbidden): log in with `hf auth login`" in sentence


def test_a_run_refuses_a_format_before_its_target_is_opened(
    world: Path, train_in: Callable[..., None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for words, sentence in (
        (["export=medusa"], "format=medusa has no place for drafts of the class Eagle3Draft"),
        (["export=tgi"], "export=tgi is not possible: it must be null or vllm or sglang"),
        (["export=vllm", "draft.fusion=linear"], "vllm can't hold this draft, since it has fusion=linear"),
    ):
        with pytest.raises(SystemExit):
            train_in(world, "+variant=eagle3", "logger=none", f"output_dir={tmp_path / 'run'}", *words)
        assert sentence in capsys.readouterr().err
        assert not (tmp_path / "run" / "draft").exists()


def test_a_run_starts_from_a_draft(world: Path, finished: Path, train_in: Callable[..., None], tmp_path: Path) -> None:
    """With a rate of 0 the draft stays what it was, draft vocabulary included, though other data are counted."""
    words = ["+variant=eagle3", "logger=none", "eval.enabled=false", "module.steps=2", "seed=8", "vocabulary_tokens=50"]
    start = f"init_from={finished / 'draft'}"
    train_in(world, *words, start, "module.lr=0", f"output_dir={tmp_path / 'still'}")
    _same(finished / "draft", tmp_path / "still" / "draft")
    train_in(world, *words, start, f"output_dir={tmp_path / 'on'}")
    a, b = (load_file(folder / "draft" / "model.safetensors") for folder in (finished, tmp_path / "on"))
    assert torch.equal(a["d2t"], b["d2t"])
    assert not torch.equal(a["fc.weight"], b["fc.weight"])


REFUSED_STARTS = {
    "another variant": (["+variant=medusa"], "of the class Eagle3Draft, but this variant trains MedusaDraftModel"),
    "another size": (["+variant=eagle3", "draft_vocab_size=39"], "use draft_vocab_size=40"),
    "another shape": (["+variant=eagle3", "draft.fc_norm=true"], "has fc_norm=False and this run's draft True: pass"),
    "other layers": (
        ["+variant=eagle3", "draft.target_layers=[1,2,3]"],
        "has target_layers=[2,4,5] and this run's draft [1,2,3]: pass ++draft.target_layers=[2,4,5]",
    ),
}


@pytest.mark.parametrize("case", REFUSED_STARTS)
def test_a_start_that_does_not_fit_is_refused(
    case: str,
    world: Path,
    finished: Path,
    train_in: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    words, sentence = REFUSED_STARTS[case]
    with pytest.raises(SystemExit):
        train_in(world, *words, "logger=none", f"init_from={finished / 'draft'}", f"output_dir={tmp_path / 'run'}")
    assert sentence in capsys.readouterr().err


def test_a_continued_run_has_the_same_start(
    world: Path, finished: Path, train_in: Callable[..., None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["+variant=eagle3", "logger=none", "eval.enabled=false", "module.steps=2"]
    start = f"init_from={finished / 'draft'}"
    train_in(world, *words, start, f"output_dir={tmp_path / 'a'}")
    last = f"ckpt_path={tmp_path / 'a' / 'last.ckpt'}"
    train_in(world, *words, start, last, f"output_dir={tmp_path / 'b'}")
    _same(tmp_path / "a" / "draft", tmp_path / "b" / "draft")
    with pytest.raises(SystemExit):
        train_in(world, *words, last, f"output_dir={tmp_path / 'c'}")
    assert "was written with another init_from (its weights)" in capsys.readouterr().err
