"""Several processes train one draft: Lightning starts and joins them, here they share a node's preparation.

Lightning joins processes only when training begins, so none waits in a collective, which would time out, while
another converts, encodes or captures.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock
from lightning.pytorch.utilities import rank_zero_only


@contextlib.contextmanager
def first_process_speaks() -> Iterator[None]:
    """Only the first of all processes prints."""
    if rank_zero_only(lambda: True)():
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


@contextlib.contextmanager
def in_turn(cache_dir: Path, processes: int) -> Iterator[None]:
    """The processes that share a cache folder do this one after another: the first does the work, the rest find it."""
    if processes == 1:
        yield
        return
    folder = cache_dir.expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "prepare.lock"):
        yield
