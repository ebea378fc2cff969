"""Every YAML file composes, every `_target_` and `path` to code exists, and the wheel carries the files."""

import importlib.util
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.errors import InstantiationException
from hydra.types import RunMode
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

import conf
from conf.check import Between, Positive, build
from spec_decode.errors import DraftwrightError

FOLDER = Path(conf.__file__).parent
GROUPS = sorted(p.relative_to(FOLDER).with_suffix("").as_posix() for p in FOLDER.glob("*/*.yaml"))
TOPS = sorted(p.stem for p in FOLDER.glob("*.yaml"))
TRAIN_GROUPS = [name for name in GROUPS if not name.startswith(("variant/", "experiment/", "sweep/"))]


def _compose(name: str, *overrides: str) -> DictConfig:
    with initialize_config_module("conf", version_base="1.3"):
        return compose(name, overrides=list(overrides))


def _choices(group: str) -> list[str]:
    return [name.split("/")[1] for name in GROUPS if name.startswith(f"{group}/")]


def _code_names(node: object) -> list[str]:
    """Dotted names of code in a config: `_target_`, the `path` of a hydra getter, the `kind` of a draft."""
    if isinstance(node, list):
        return [name for value in node for name in _code_names(value)]
    if not isinstance(node, dict):
        return []
    names = [node[key] for key in ("_target_", "kind") if node.get(key)]
    if str(node.get("_target_", "")).startswith("hydra.utils.get"):
        names.append(node["path"])
    return names + [name for value in node.values() for name in _code_names(value)]


def _check_code(cfg: DictConfig) -> None:
    for name in _code_names(OmegaConf.to_container(cfg, resolve=False)):
        assert callable(get_object(name)), name


@pytest.mark.parametrize("variant", _choices("variant"))
def test_variants_compose_and_resolve(variant: str) -> None:
    cfg = _compose("train", f"+variant={variant}")
    assert cfg.variant.name == variant
    assert cfg.output_dir.startswith(f"outputs/{variant}/2")
    _check_code(cfg)


@pytest.mark.parametrize("choice", TRAIN_GROUPS)
def test_each_choice_composes_with_train(choice: str) -> None:
    group, _, option = choice.partition("/")
    _check_code(_compose("train", "+variant=eagle3", f"{group}={option}"))


@pytest.mark.parametrize("experiment", _choices("experiment"))
def test_experiments_compose(experiment: str) -> None:
    _check_code(_compose("train", "+variant=eagle3", f"+experiment={experiment}"))


@pytest.mark.parametrize("target", ["llama31_8b", "qwen3_8b"])
@pytest.mark.parametrize("trainer", ["gpu", "ddp", "multinode"])
def test_published_recipes_compose_with_each_trainer(target: str, trainer: str) -> None:
    cfg = _compose("train", "+variant=eagle3", f"trainer={trainer}", f"+experiment={target}_eagle3")
    _check_code(cfg)
    assert (cfg.module.lr, cfg.module.steps, cfg.module.optimizer.name) == (5e-5, 7, "adamw")
    assert (cfg.target.dtype, cfg.draft_vocab_size, cfg.max_length) == ("bfloat16", 32_000, 2048)
    assert cfg.trainer.get("num_nodes", 1) == (2 if trainer == "multinode" else 1)


@pytest.mark.parametrize(("launcher", "kind"), [("local", "JoblibLauncher"), ("slurm", "SlurmLauncher")])
def test_launchers_compose(launcher: str, kind: str) -> None:
    pytest.importorskip({"local": "joblib", "slurm": "submitit"}[launcher])
    with initialize_config_module("conf", version_base="1.3"):
        cfg = compose("train", overrides=["+variant=eagle3", f"hydra/launcher={launcher}"], return_hydra_config=True)
    assert cfg.hydra.launcher._target_.endswith(kind)
    assert callable(get_object(cfg.hydra.launcher._target_))


@pytest.mark.parametrize("sweep", _choices("sweep"))
def test_sweeps_compose(sweep: str) -> None:
    with initialize_config_module("conf", version_base="1.3"):
        cfg = compose("train", overrides=["+variant=eagle3", f"+sweep={sweep}"], return_hydra_config=True)
    assert cfg.hydra.mode == RunMode.MULTIRUN
    assert cfg.hydra.sweep.dir == "outputs/search/eagle3"
    for key in cfg.hydra.sweeper.params:
        assert OmegaConf.select(cfg, key) is not None, key


@pytest.mark.parametrize("top", TOPS)
def test_each_entry_point_composes(top: str) -> None:
    _check_code(_compose(top))


def test_logging_is_offline_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    assert _compose("train", "+variant=eagle3").logger.mode == "offline"
    assert _compose("train", "+variant=eagle3", "logger=wandb").logger.mode == "online"
    monkeypatch.setenv("WANDB_MODE", "online")
    assert _compose("train", "+variant=eagle3").logger.mode == "online"


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DRAFTWRIGHT_CACHE", raising=False)
    assert _compose("train", "+variant=eagle3").cache_dir == "~/.cache/draftwright"
    monkeypatch.setenv("DRAFTWRIGHT_CACHE", "/somewhere")
    cfg = _compose("train", "+variant=eagle3")
    assert (cfg.cache_dir, cfg.target.cache_dir) == ("/somewhere", "/somewhere")


@pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="hatchling is not installed")
def test_wheel_carries_packages_and_yaml(tmp_path: Path) -> None:
    from hatchling.builders.wheel import WheelBuilder

    (wheel,) = WheelBuilder(str(FOLDER.parent)).build(directory=str(tmp_path), versions=["standard"])
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"conf/{name}.yaml" for name in (*GROUPS, *TOPS)} <= names
    assert {f"{package}/__init__.py" for package in ("train", "data", "spec_decode", "eval", "conf")} <= names
    assert {"hydra_plugins/draftwright.py", "conf/hydra/sweeper/optuna.yaml"} <= names
    assert not any(name.startswith(("tests/", "outputs/")) for name in names)


@dataclass(frozen=True)
class Part:
    rate: float = 1.0


@dataclass(frozen=True)
class Whole:
    count: Positive
    share: Annotated[float, Between(0, 1)]
    kind: Literal["a", "b"]
    names: str | tuple[str, ...]
    folder: Path | None
    on: bool
    part: Part
    rest: dict[str, Any]


RIGHT = {"count": 3, "share": 1, "kind": "b", "names": ["x"], "folder": "f", "on": True, "part": {}, "rest": {"k": [1]}}


def test_values_become_what_the_annotations_say() -> None:
    assert build(Whole, RIGHT) == Whole(3, 1.0, "b", ("x",), Path("f"), True, Part(), {"k": [1]})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"count": 0}, "count=0 is not possible: it must be a whole number of at least 1"),
        ({"count": True}, "count=true is not possible: it must be a whole number of at least 1"),
        ({"count": 2.0}, "count=2.0 is not possible"),
        ({"share": 1.5}, "share=1.5 is not possible: it must be a number from 0 to 1"),
        ({"share": float("nan")}, "share=NaN is not possible"),
        ({"kind": "c"}, "kind=c is not possible: it must be a or b"),
        ({"names": []}, r"names=\[\] is not possible: it must be text or a list with at least one entry, each text"),
        ({"folder": 7}, "folder=7 is not possible: it must be null or a path"),
        ({"on": "maybe"}, "on=maybe is not possible: it must be true or false"),
        ({"part": {"rate": "x"}}, "part.rate=x is not possible: it must be a number"),
        ({"part": {"speed": 1}}, "there is no config key 'part.speed': choose from rate"),
        ({"part": 3}, "part=3 is not possible: it must be a section with keys"),
        ({"rest": None}, "rest=null is not possible: it must be a section with keys"),
        ({"extra": 1}, "there is no config key 'extra'"),
    ],
)
def test_wrong_values_are_named(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DraftwrightError, match=f"^{sentence}"):
        build(Whole, RIGHT | changes)


def test_missing_key_is_named() -> None:
    with pytest.raises(DraftwrightError, match=r"^the config key 'kind' is missing: pass kind=…"):
        build(Whole, {key: value for key, value in RIGHT.items() if key != "kind"})


def test_added_keys_need_a_section_or_a_group() -> None:
    with initialize_config_module("conf", version_base="1.3"):
        conf.refuse_additions(["+variant=eagle3", "+trainer.strategy=auto", "+logger.tags=[a]", "++seed=1", "seed=2"])
        with pytest.raises(DraftwrightError, match=r"'\+seed2=1' adds a key that nothing reads"):
            conf.refuse_additions(["seed=1", "+seed2=1"])


def test_home_is_expanded_in_values_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    words = ["output_dir=~/out", "~trainer.precision", "a=b~c"]
    assert [conf.expand_home(word) for word in words] == ["output_dir=/home/me/out", "~trainer.precision", "a=b~c"]


def test_mistake_inside_an_instantiated_class_is_told() -> None:
    error = InstantiationException("Error in call to target …")
    error.__cause__ = DraftwrightError("one sentence")
    assert conf.one_sentence("train", error) == "one sentence"


@pytest.mark.parametrize(
    ("bfloat16", "dtype", "precision"), [(True, "bfloat16", "bf16-mixed"), (False, "float32", "32-true")]
)
def test_trainer_decides_what_suits_its_device(
    bfloat16: bool, dtype: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bfloat16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cpu, gpu = (_compose("train", "+variant=eagle3", f"trainer={name}") for name in ("cpu", "gpu"))
    assert (cpu.target.dtype, cpu.eval.dtype, cpu.module.steps) == (dtype, "float32", 3)
    assert cpu.trainer.precision == precision
    assert (gpu.target.dtype, gpu.eval.dtype, gpu.module.steps) == ("bfloat16", "bfloat16", 7)
