"""Files that appear whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from spec_decode.checkpoint import write_atomically


def test_writers_of_the_same_path_do_not_meet(tmp_path: Path) -> None:
    def write(path: Path) -> None:
        path.write_text("first to begin")
        write_atomically(tmp_path / "file", lambda other: other.write_text("second"))
        assert (tmp_path / "file").read_text() == "second"

    write_atomically(tmp_path / "file", write)
    assert (tmp_path / "file").read_text() == "first to begin"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        path.write_text("half")
        raise OSError("disk full")

    (tmp_path / "file").write_text("old")
    with pytest.raises(OSError, match="disk full"):
        write_atomically(tmp_path / "file", fail)
    assert (tmp_path / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
