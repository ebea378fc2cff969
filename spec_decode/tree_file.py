"""Tree files: a sparse tree as JSON, {"paths": [[0], [1], [0, 0], …]} and whatever else its writer notes."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from spec_decode.checkpoint import as_text, write_folder
from spec_decode.errors import DraftwrightError
from spec_decode.tree import SparseTree


def read_tree(path: Path) -> SparseTree:
    """The tree in a file. Raises DraftwrightError for what is no tree file."""
    try:
        content = json.loads(path.expanduser().read_text())
        return SparseTree(content["paths"], content.get("siblings", "top_k"))
    except OSError as error:
        raise DraftwrightError(
            f"the tree file {path} can't be read ({error.strerror}): pass one that tune wrote"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DraftwrightError(f"{path} is no tree file ({error}): pass one that python -m eval tune wrote") from error


def write_tree(tree: SparseTree, path: Path, **notes: Any) -> None:
    """Write the tree and the notes, atomically."""
    write_folder(path.parent, {path.name: as_text(json.dumps({**notes, **asdict(tree)}) + "\n")})
