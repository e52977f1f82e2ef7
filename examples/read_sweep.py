"""Run a small sweep and read its results into pandas.

The sweep is the command line `moe-lab run criterion=reap,man ...`; a finished one is not run
again.
"""

import subprocess
import sys
from pathlib import Path

from moe_lab.analysis.load.study import load
from moe_lab.analysis.registry import Results

STORE = Path(sys.argv[1] if len(sys.argv) > 1 else "store")
SETTINGS = ["study=example", "criterion=reap,man", "ratio=0.25,0.5", "suite=pocket_quick"]
SETTINGS += ["suite.benchmarks=[pocket_arc_challenge,pocket_boolq,pocket_gsm8k]"]
subprocess.run([sys.executable, "-m", "moe_lab", *SETTINGS, f"store={STORE}"], check=True)

study = load(STORE, "example")
scores = study.results.pivot_table(index="cell", columns="benchmark", values="score")
table = study.cells[["criterion", "ratio"]].join(scores)
print(table.round(3).to_string())

[comparison] = Results(study).comparisons
averages = comparison.score(comparison.average_columns(comparison.benchmarks_of))
print("\nmean of the displayed columns, by cell:", averages.round(3).to_dict())
