"""The step that measures how fast a pruned model is, as it would be deployed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from moe_lab.config import ModelConfig, TimingConfig
from moe_lab.errors import Unavailable
from moe_lab.json_files import write_json
from moe_lab.study.job import Job
from moe_lab.study.kinds.shared import model_and_tokenizer, plan_of, rows, write_table


def timing(job: Job) -> None:
    """Seconds of prompts and answers, and memory, of the model without what its plan removes, in the bits it is stored
    in. Unavailable on another device than the step is about."""
    import torch

    from moe_lab.evaluation.timing import COLUMNS, measure
    from moe_lab.models.device import device_name

    settings, asked = ModelConfig(**job.runtime["model"]), dict(job.settings["timing"])
    device = asked["device"]
    if (found := device_name(settings.device)) != device:
        raise Unavailable(f"timing is about {device}, and this machine has {found}: run it there, or set timed.device")
    network, tokenizer = model_and_tokenizer(job)
    model = _deployed(job, network)
    tokens = torch.cat([ids[valid] for ids, valid in rows(job, tokenizer, "text")])
    conditions = TimingConfig(**{name: value for name, value in asked.items() if name != "threads"})
    load = os.getloadavg()[0]
    measured = measure(model, tokens, conditions)
    write_table(job.output("timing.parquet"), COLUMNS, measured)
    write_json(job.output("timing.json"), {"device": device, "load": load, **_about(model)})


def _deployed(job: Job, network: Any) -> Any:
    """The model that a server would hold."""
    from moe_lab.recovery.apply import recovered

    plan, storage = plan_of(job), job.settings.get("storage", {"bits": 16, "modules": []})
    tuned = Path(job.inputs["finetune"]) if "finetune" in job.inputs else None
    if plan is None and storage["bits"] == 16:
        return network
    return recovered(network, plan, bits=storage["bits"], modules=storage["modules"], tuned=tuned)


def _about(model: Any) -> dict[str, Any]:
    import torch

    from moe_lab.recovery.parts import experts_of, storage

    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "experts": sorted({type(one.module).__name__ for one in experts_of(model)}),
        "weight_bytes": storage(model)["total"],
    }
