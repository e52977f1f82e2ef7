"""Models that a process holds in memory from one step to the next."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_lab.config import BackendConfig, ModelConfig
from moe_lab.machine import release_memory

if TYPE_CHECKING:
    from moe_lab.evaluation.engines.vllm import OpenEngine, VllmModel


class Models:
    """The models that a process holds, at most one of each sort: loaded, recovered, without
    weights, and in an engine. Steps get them with their files, and the next step with the same
    model takes what is there."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[Any, Any]] = {}
        self._engine: OpenEngine | None = None

    def _hold(self, sort: str, key: Any, make: Callable[[], Any]) -> Any:
        """The object of a sort, which is made if another one, or none, is held."""
        if sort not in self._held or self._held[sort][0] != key:
            self._held.pop(sort, None)  # before the next one, as memory may not be enough for both
            self._held[sort] = (key, make())
        return self._held[sort][1]

    def loaded(self, model: ModelConfig) -> tuple[Any, Any]:
        """The model and its tokenizer. An engine is ended, as both may need all the memory of a
        device."""
        from moe_lab.models.load import load_model

        if self._engine:
            self._engine.close()
        if self._held.get("loaded", (model,))[0] != model:
            self._held.pop("recovered", None)
        pair: tuple[Any, Any] = self._hold("loaded", model, lambda: load_model(model))
        return pair

    def recovered(self, model: ModelConfig, plan: Any, **changes: Any) -> Any:
        """A copy of the loaded model under a plan, with the changes of a recovery: arguments of
        `recovery.apply.recovered`."""
        from moe_lab.recovery.apply import recovered

        network, _ = self.loaded(model)
        return self._hold(
            "recovered", (model, plan, changes), lambda: recovered(network, plan, **changes)
        )

    def skeleton(self, model: ModelConfig) -> Any:
        """The model on the meta device, without weights."""
        from moe_lab.models import load
        from moe_lab.models.files import local_folder

        def make() -> Any:
            folder = local_folder(model)
            network = load.skeleton(folder, trust_remote_code=model.trust_remote_code).eval()
            load.set_top_k(network, model.top_k)
            return network

        return self._hold("skeleton", model, make)

    def engine(
        self, checkpoint: Path, backend: BackendConfig, model: ModelConfig, plan: Any
    ) -> VllmModel:
        """The model in `checkpoint` in vLLM, with `plan` as its mask. Loaded models are freed."""
        from moe_lab.evaluation.engines.vllm import OpenEngine

        self._held.clear()
        release_memory()
        self._engine = self._engine or OpenEngine()
        return self._engine.open(checkpoint, backend, model, plan)
