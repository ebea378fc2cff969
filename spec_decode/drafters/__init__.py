"""All drafts, one file each; `load_draft` opens a folder that any of them wrote."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from spec_decode.checkpoint import read_config
from spec_decode.drafter import Drafter
from spec_decode.errors import DraftwrightError, check_type


def load_draft(folder: str | Path) -> Drafter:
    """The draft in `folder`; config.json names its class as "file.Class" in this package."""
    check_type("folder", folder, str | Path, "a path")
    name = str(read_config(Path(folder))["drafter"])
    module, _, kind = name.partition(".")
    try:
        drafter = getattr(import_module(f"spec_decode.drafters.{module}"), kind)
    except (ImportError, AttributeError, ValueError) as error:
        raise DraftwrightError(f"{folder}/config.json names the unknown drafter '{name}'") from error
    if not hasattr(drafter, "from_pretrained"):
        raise DraftwrightError(f"{folder}/config.json names '{name}', which is not stored in a folder")
    return drafter.from_pretrained(folder)
