"""Who imports whom (design: spec_decode <- data <- train, eval; train and eval never each other)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ALLOWED = {
    "conf": {"spec_decode"},  # the launcher prints spec_decode.errors
    "spec_decode": set(),
    "data": {"conf", "spec_decode"},
    "train": {"conf", "data", "spec_decode"},
    "eval": {"conf", "data", "spec_decode"},
    "hydra_plugins": {"spec_decode", "train"},
}
THIRD_PARTY = {
    "lightning": {"train", "data/module.py"},
    "hydra": {"cli.py", "run.py", "conf/__init__.py", "train/sweep.py", "train/search.py", "hydra_plugins"},
    "optuna": {"train/search.py"},
    "wandb": {"train"},
}
# Training ends with an evaluation; this one late import starts it.
EXCEPTIONS = {("train/run.py", "eval")}


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("package", ALLOWED)
def test_packages_import_only_what_lies_below(package):
    for path in sorted((ROOT / package).rglob("*.py")):
        name = str(path.relative_to(ROOT))
        ours = imports(path) & ALLOWED.keys() - {package}
        extra = {other for other in ours - ALLOWED[package] if (name, other) not in EXCEPTIONS}
        assert not extra, f"{name} imports {extra}"


@pytest.mark.parametrize("library", THIRD_PARTY)
def test_libraries_stay_where_they_belong(library):
    for package in ALLOWED:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            places = THIRD_PARTY[library]
            if not places & {package, name, path.name}:
                assert library not in imports(path), f"{name} imports {library}"


def test_spec_decode_needs_torch_and_transformers_only():
    allowed = {"torch", "transformers", "safetensors", "spec_decode"}
    standard = __import__("sys").stdlib_module_names
    for path in sorted((ROOT / "spec_decode").rglob("*.py")):
        extra = imports(path) - allowed - standard
        assert not extra, f"{path.relative_to(ROOT)} imports {extra}"
