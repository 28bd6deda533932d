"""benchmarks/memory_watch.py: how much memory all processes take, and at most took."""

import subprocess
import sys
import threading

from memory_watch import Memory, MemoryWatch, kibibytes

MEBIBYTE = 1024  # KiB
HELD_MEBIBYTES = 64


def test_field_of_proc_is_found_by_its_whole_name() -> None:
    text = "Rss:     900 kB\nSwapPss:   1 kB\nPss_Anon:   2 kB\nPss:     300 kB\n"
    assert kibibytes(text, "Pss") == 300
    assert kibibytes(text, "Rss") == 900


def test_memory_of_a_child_counts_in_all_processes_and_not_in_this_one() -> None:
    script = f"held = bytearray(b'1') * ({HELD_MEBIBYTES} << 20); print(flush=True); input()"
    before = Memory.now()
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        with_child = Memory.now()
        child.stdin.close()
    theirs = with_child.all_processes - with_child.this_process
    assert theirs - (before.all_processes - before.this_process) >= HELD_MEBIBYTES * MEBIBYTE
    assert with_child.this_process - before.this_process < HELD_MEBIBYTES * MEBIBYTE / 2


def test_watch_keeps_the_greatest_and_ends_its_thread() -> None:
    threads = threading.active_count()
    with MemoryWatch() as watch:
        began = watch.peak
        held = bytearray(b"1") * (HELD_MEBIBYTES << 20)
    # It looks once more at the end of the block, so there is nothing to wait for.
    assert watch.peak.this_process - began.this_process >= len(held) / 1024 * 0.9
    assert threading.active_count() == threads


def test_peaks_of_both_numbers_may_be_of_different_moments() -> None:
    assert Memory(7, 1).peak_with(Memory(5, 3)) == Memory(7, 3)
