"""Pages of a mapped file that are given back."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest

from dspine.llama.pages import forget_pages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux maps")
_PAGES = 64


def _resident_kib(path: Path) -> int:
    """Resident memory of the mappings of `path` in this process (proc_pid_smaps(5))."""
    found, ours = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            ours = bool(rest) and rest[-1] == str(path)
        elif ours and name == "Rss:":
            found += int(rest[0])
    return found


def test_pages_are_given_back_and_come_again(tmp_path: Path) -> None:
    path = tmp_path.resolve() / "model.gguf"
    path.write_bytes(bytes(range(256)) * 16 * _PAGES)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        whole = bytes(mapped)
        assert _resident_kib(path) == 4 * _PAGES
        forget_pages(path)
        assert _resident_kib(path) == 0
        assert bytes(mapped) == whole


def test_changes_of_a_private_mapping_stay(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(8192))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        mapped[5] = 7
        forget_pages(path)
        assert mapped[5] == 7
