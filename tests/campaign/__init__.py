"""What is done to moe_lab on purpose: kills, hostile programs, wrong command lines, broken models.

The helpers of other tests are found in their folders, as pytest finds them.
"""

import sys
from pathlib import Path

sys.path += [
    str(Path(__file__).parents[1] / folder)
    for folder in ("evaluation", "slurm", "analysis", "models")
]
