"""Bytes of files are read before they are needed, so that the disk works while processors do."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

BLOCK = 8 << 20
"""Bytes of one read."""

Ranges = Sequence[tuple[Path, int, int]]
"""(file, first byte, how many)."""


class Ahead:
    """Reads ranges of files into the system's cache, in a thread of its own, in the order in which they are asked for.

    Advice to the system (posix_fadvise) would do for a few MB: of each range it follows no more than the disk's
    read-ahead.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._asked: dict[int, Future[None]] = {}

    def ask(self, number: int, ranges: Ranges) -> None:
        """Read `ranges`, to be waited for by `number`; nothing happens when that was asked and not yet waited for."""
        if number not in self._asked:
            self._asked[number] = self._thread.submit(_read, _joined(ranges))

    def wait(self, number: int) -> None:
        """Wait until what was asked for is read. Whether it could be is found by who needs it."""
        wait([self._asked.pop(number)])


def _joined(ranges: Ranges) -> list[tuple[Path, int, int]]:
    """The same bytes in order, ranges that touch as one."""
    found: list[tuple[Path, int, int]] = []
    for file, start, size in sorted(ranges):
        if found and found[-1][0] == file and found[-1][1] + found[-1][2] == start:
            found[-1] = (file, found[-1][1], found[-1][2] + size)
        else:
            found.append((file, start, size))
    return found


def _read(ranges: Ranges) -> None:
    buffer = memoryview(bytearray(BLOCK))
    for path, start, size in ranges:
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            while size and (count := file.readinto(buffer[:size])):
                size -= count
