"""Time to check finished steps when a run starts: comparing sizes and times of files, against
hashing every byte.

python -m benchmarks.storage --gib 2
"""

from __future__ import annotations

import os
import tempfile
from statistics import median

from benchmarks.measure import parser, wall_seconds
from moe_lab.study.provenance import damaged_files
from moe_lab.study.step import Step
from moe_lab.study.store import Store

MIB = 2**20


class NumberedStep(Step):
    """A step that is identified by a number."""

    kind = "plan"
    number: int

    def label(self) -> str:
        return f"step{self.number}"


def fill(store: Store, gib: float, steps: int) -> list[Step]:
    """Publish `steps` steps with `gib` GiB in total; returns them."""
    published: list[Step] = [NumberedStep(number) for number in range(steps)]
    block = os.urandom(int(gib * 2**30 / steps))
    for step in published:
        with store.claim(step) as scratch:
            assert scratch is not None
            (scratch / "data.bin").write_bytes(block)
    return published


def main() -> None:
    """Measure and print the seconds of both, and their ratio."""
    options = parser("storage", __doc__)
    options.add_argument("--gib", type=float, default=2.0)
    options.add_argument("--steps", type=int, default=1000)
    options.add_argument("--pairs", type=int, default=5)
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        steps = fill(Store(folder).create(), arguments.gib, arguments.steps)

        def compare() -> None:
            store = Store(folder).create()
            assert all(store.is_finished(step) for step in steps)

        def hash_all() -> None:
            store = Store(folder).create()
            assert not any(damaged_files(store.path(step), hash_all=True) for step in steps)

        pairs = [(wall_seconds(compare), wall_seconds(hash_all)) for _ in range(arguments.pairs)]
    ratio = median(compared / hashed for compared, hashed in pairs)
    compared, hashed = (median(seconds) for seconds in zip(*pairs, strict=True))
    print(
        f"{arguments.gib:g} GiB in {arguments.steps} steps: compared in {compared:.3f} s, hashed "
        f"in {hashed:.2f} s, {ratio:.3f}"
    )


if __name__ == "__main__":
    main()
