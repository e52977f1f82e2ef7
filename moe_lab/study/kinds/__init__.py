"""What each kind of step does: a job's files in, files in its scratch folder out.

This is the only package that knows all parts. Imports are inside, since a process that only evaluates needs no
calibration, and one that only scores needs no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from moe_lab.json_files import write_json
from moe_lab.study.job import Job
from moe_lab.study.kinds import choosing, measuring, pruned, settling, timing
from moe_lab.study.provenance import provenance

KINDS: Mapping[str, Callable[[Job], None]] = {
    function.__name__: function
    for function in (
        measuring.model,
        measuring.statistics,
        settling.convergence,
        settling.channel_convergence,
        measuring.gradients,
        measuring.weight_gradients,
        measuring.damage,
        measuring.ablation,
        measuring.scaling,
        measuring.weights,
        measuring.channel_weights,
        choosing.scores,
        choosing.family,
        choosing.plan,
        choosing.search,
        choosing.reconstruction,
        choosing.sequential,
        pruned.finetune,
        pruned.evaluate,
        pruned.generate,
        pruned.grade,
        pruned.cost,
        pruned.profile,
        timing.timing,
        pruned.export,
    )
}


def perform(job: Job) -> None:
    """Do `job`: fill its scratch folder, provenance included. Whatever is raised is the job's failure."""
    start = time.time()
    if places := job.runtime.get("plugins"):
        from moe_lab import plugins

        plugins.bring(places)
    KINDS[job.kind](job)
    write_json(job.output("provenance.json"), provenance(start))
