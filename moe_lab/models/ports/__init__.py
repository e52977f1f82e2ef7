"""Families that transformers has no code for: importing this package registers moe_lab's code with transformers."""

from __future__ import annotations

from importlib import import_module

from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from moe_lab.models.families import PORTS
from moe_lab.models.transformers_private import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def causal_language_model(kind: str) -> str | None:
    """Name of the class of causal language models of a model type, in transformers or here.

    None where there is none.
    """
    if kind in PORTS:
        return f"{PORTS[kind].base}ForCausalLM"
    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind) if kind in CONFIG_MAPPING else None


def _register() -> None:
    for kind, port in PORTS.items():
        module = import_module(f"moe_lab.models.ports.{port.file}")
        config = getattr(module, f"{port.base}Config")
        AutoConfig.register(kind, config, exist_ok=True)
        AutoModelForCausalLM.register(config, getattr(module, f"{port.base}ForCausalLM"), exist_ok=True)


_register()
