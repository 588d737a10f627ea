import platform
import subprocess
import sys

import pytest

from varuna.process.allocator import keep_freed_memory

ROUNDS = """
import resource, sys
from varuna.process.allocator import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [bytearray(2**20) for _ in range(32)]
    del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print([faults() for _ in range(4)][-1])
"""


def faults(monkeypatch: pytest.MonkeyPatch, how: str) -> int:
    for name in ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    told = subprocess.run([sys.executable, "-c", ROUNDS, how], capture_output=True, text=True, check=True, timeout=60)
    return int(told.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such settings")
def test_memory_that_was_freed_is_used_again_without_a_page_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = 32 * 2**20 // 4096
    assert faults(monkeypatch, "as it was") > pages / 2
    assert faults(monkeypatch, "keep") < pages / 50


def test_an_allocator_that_the_environment_chose_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "libjemalloc.so.2")
    assert not keep_freed_memory()
