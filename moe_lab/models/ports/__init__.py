"""Families that transformers has no code for: importing this package registers moe_lab's code with transformers."""

from __future__ import annotations

from importlib import import_module

from transformers import AutoConfig, AutoModelForCausalLM

from moe_lab.models.families import PORTS

for kind, port in PORTS.items():
    _module = import_module(f"moe_lab.models.ports.{port.file}")
    _config = getattr(_module, f"{port.base}Config")
    AutoConfig.register(kind, _config, exist_ok=True)
    AutoModelForCausalLM.register(_config, getattr(_module, f"{port.base}ForCausalLM"), exist_ok=True)
