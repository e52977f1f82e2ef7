"""What is done to moe_lab on purpose: kills, hostile programs, wrong command lines, broken models.

    python -m tests.campaign [kills|programs|commands|models ...] [--kills N] [--seed N] [--out FILE]

The helpers of other tests are found in their folders, as pytest finds them.
"""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
for _folder in ("", "evaluation", "slurm", "analysis", "models"):
    if str(TESTS / _folder) not in sys.path:
        sys.path.append(str(TESTS / _folder))
