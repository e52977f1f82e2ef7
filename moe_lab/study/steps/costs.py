"""Steps that measure a pruned model: parameters, FLOPs, time and memory, and the behaviour of its
layers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any, Self

from moe_lab import result_files
from moe_lab.calibration import IdentifiedText
from moe_lab.config import CalibrationConfig, LauncherConfig, ModelConfig, TimingConfig
from moe_lab.errors import Unavailable, UserError, user_errors
from moe_lab.json_files import write_json
from moe_lab.models.config_json import check_plain_weights, config_of, has_packed_experts
from moe_lab.study.estimates import hardware_name
from moe_lab.study.resources import Resources, text_pass
from moe_lab.study.step import Step
from moe_lab.study.steps.files import Files, read_text, text_passes
from moe_lab.study.steps.passes import Arithmetic, Facts, ModelIdentity
from moe_lab.study.steps.recovery import PlanStep, Pruned, Storage


def timing_of(timed: TimingConfig, model: ModelConfig) -> TimingConfig:
    """`timed`, with a `device` of None replaced by the name of the hardware that `model.device`
    selects. It remains None if this machine has no such hardware."""
    if not timed.device:
        with suppress(UserError):
            return replace(timed, device=hardware_name(model.device))
    return timed


class Cost(Step):
    """Parameters, storage, and FLOPs per token of a model. If experts of a layer may differ in
    width, FLOPs depend on routing, which is measured on a calibration set."""

    kind = "cost"
    small = True
    facts: Facts
    plan: PlanStep | None
    storage: Storage | None
    row: int
    """Tokens per row."""
    unpruned: Cost | None
    """The cost of the unpruned model; None for this cost itself."""
    text: IdentifiedText | None
    """The text on which routing is measured; None if FLOPs do not depend on routing."""
    arithmetic: Arithmetic | None
    """None if `text` is None."""
    pruned: Pruned
    runtime = ("pruned",)

    @classmethod
    def of(cls, pruned: Pruned, text: CalibrationConfig, unpruned: Cost | None = None) -> Self:
        """The step for the cost of a pruned model. `text`: calibration set whose row length is
        used, and on which routing is measured if necessary."""
        # whether experts of a layer may differ in width
        if pruned.plan is None:
            needs_routing = has_packed_experts(config_of(pruned.model))
        else:
            needs_routing = not pruned.drops_whole_experts
        return cls(
            facts=pruned.loaded.facts,
            plan=pruned.plan,
            storage=pruned.storage,
            row=text.length,
            unpruned=unpruned,
            text=IdentifiedText.of(text) if needs_routing else None,
            arithmetic=pruned.loaded.arithmetic if needs_routing else None,
            pruned=pruned,
        )

    def label(self) -> str:
        return self.pruned.recovered_label

    def resources(self) -> Resources:
        model = self.pruned.model
        run = text_pass(model, self.text) if self.text else Resources(model=model)
        run = run._replace(pace=[self.text is not None])
        # the Slurm job of evaluations loads the pruned model anyway
        return run._replace(job="evaluate", steps_per_job="models") if self.plan else run

    def work(self, files: Files) -> None:
        """Write cost.json. Raises UserError if experts of a layer differ in width, but `text` is
        None."""
        from moe_lab.models.discover import routed_layers
        from moe_lab.pruning.cost import LoadHook, cost, even_routing, measured_routing, model_flops
        from moe_lab.pruning.prune import prune

        network = files.models.skeleton(self.pruned.model)
        plan = files.plan(self.plan)
        pruned = prune(network, plan) if plan else network
        layers = routed_layers(pruned)
        routing: Any = even_routing(layers)
        if not routing:  # None, because experts of a layer differ in width
            if self.text is None:
                raise UserError(
                    f"cost of model={self.pruned.model.name}: its experts differ in width, which "
                    "is known only of a folder: download it, and give the folder as model.path"
                )
            passes = text_passes(self.pruned.model, self.text, files)
            load = passes.collect_statistics(LoadHook, plan=plan).layers
            routing = measured_routing(load, plan, layers)
        # FLOPs per token of the unpruned model, counted once for all plans
        if self.unpruned:
            flops = json.loads(files.read(self.unpruned, "cost.json"))["flops_per_token"]
        else:
            flops = model_flops(network, self.row, routing)
        storage = asdict(self.storage) if self.storage else {}
        write_json(files.out / "cost.json", cost(network, pruned, flops, routing, **storage))


class Profile(Step):
    """Variance of hidden states over tokens after every layer, and the entropy of every layer's
    router, in the pruned model before recovery."""

    kind = "profile"
    small = True
    whole_model = True
    loaded: ModelIdentity
    text: IdentifiedText
    plan: PlanStep | None

    def label(self) -> str:
        return self.plan.label() if self.plan else self.loaded.model.name

    def resources(self) -> Resources:
        # merged experts are new weights, for which a second copy of the model is assumed
        copies = 2 if self.plan and self.plan.setup.merges_experts else 1
        return text_pass(self.loaded.model, self.text, engine="resident", copies=copies)

    def work(self, files: Files) -> None:
        from moe_lab.pruning.profile import profile

        network, tokenizer = files.models.load(self.loaded.model)
        rows = profile(network, files.plan(self.plan), read_text(self.text, tokenizer, files))
        files.table("profile.parquet", result_files.PROFILES, rows)


class Timing(Step):
    """Seconds for prompts and answers, and memory, of the pruned, fine-tuned and quantised
    model."""

    kind = "timing"
    small = True
    whole_model = True
    pruned: Pruned
    text: IdentifiedText
    """The text from which prompts are taken."""
    timed: TimingConfig
    threads: int | None

    def label(self) -> str:
        return self.pruned.recovered_label

    def resources(self) -> Resources:
        model = self.pruned.model
        device = self.timed.device
        # two copies: the loaded model and the deployed one
        run = text_pass(model, self.text, engine="resident", copies=2)
        run_on_one_gpu = run._replace(gpu_counts=[1])
        if device is None:
            # `hardware_name` will raise UserError, because this machine does not have the device
            return run_on_one_gpu._replace(start_checks=[(hardware_name, model.device)])
        # several GPUs are named as in "8 x NVIDIA H100"
        return run if " x " in device else run_on_one_gpu

    def work(self, files: Files) -> None:
        """Write timing.parquet, and timing.json with the conditions of the measurement. Raises
        Unavailable if the device of this machine is not `timed.device`."""
        import torch

        from moe_lab.evaluation.timing import measure
        from moe_lab.models.discover import is_experts
        from moe_lab.models.load import device_name
        from moe_lab.recovery.apply import storage_bytes

        device = self.timed.device
        local_device = device_name(self.pruned.model.device)
        if local_device != device:
            raise Unavailable(
                f"timing is about {device}, and this machine has {local_device}: run it there, or "
                "set timed.device"
            )
        network, tokenizer = files.models.load(self.pruned.model)
        model = self.deployed_model(network, files)
        tokens = torch.cat([ids[valid] for ids, valid in read_text(self.text, tokenizer, files)])
        # read before the measurement, because the measurement raises it
        load_average = os.getloadavg()[0]
        files.table("timing.parquet", result_files.TIMINGS, measure(model, tokens, self.timed))
        conditions = {
            "device": device,
            "load": load_average,
            "dtype": str(model.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "experts": sorted(
                {type(module).__name__ for module in model.modules() if is_experts(module)}
            ),
            "weight_bytes": storage_bytes(model),
        }
        write_json(files.out / "timing.json", conditions)

    def deployed_model(self, network: Any, files: Files) -> Any:
        """The model as a server would load it: pruned, fine-tuned and quantised. `network`: the
        unpruned model."""
        from moe_lab.recovery.apply import recovered

        pruned = self.pruned
        if not (pruned.plan or pruned.storage):
            return network
        return recovered(network, files.plan(pruned.plan), **pruned.recovery_arguments(files))


def timing_mistakes(
    launcher: LauncherConfig, timed: TimingConfig, model: ModelConfig
) -> Iterator[str]:
    """Yield a sentence for each reason why `model` cannot be timed with these settings."""
    if launcher.name == "local":
        yield "timing=true beside other work would measure that too: expected launcher=inline"
    if launcher.name == "slurm" and timed.device is None:
        yield (
            "timing=true with launcher=slurm needs timed.device: expected the name of the "
            "nodes' GPU, as jobs see it"
        )
    yield from user_errors(check_plain_weights, model, "timing=true")
