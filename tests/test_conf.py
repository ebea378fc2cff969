"""Every YAML file composes, every `_target_` and `path` to code exists, and the wheel carries the files."""

import importlib.util
import zipfile
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

import conf

FOLDER = Path(conf.__file__).parent
GROUPS = sorted(p.relative_to(FOLDER).with_suffix("").as_posix() for p in FOLDER.glob("*/*.yaml"))
TOPS = sorted(p.stem for p in FOLDER.glob("*.yaml"))
TRAIN_GROUPS = [name for name in GROUPS if not name.startswith(("variant/", "experiment/"))]


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
    assert not any(name.startswith(("tests/", "outputs/")) for name in names)
