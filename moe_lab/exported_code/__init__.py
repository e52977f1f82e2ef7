"""Code that lies beside the weights of exports, and needs torch and transformers alone.

`pruned` and `ragged` are for exports whose layers differ; `ragged` is also what a model in memory
is pruned to. The others are families that transformers has no code for: importing this package
registers them with transformers.
"""

from __future__ import annotations

from importlib import import_module

from transformers import AutoConfig, AutoModelForCausalLM

from moe_lab.models.families import PORTS

for kind, port in PORTS.items():
    _module = import_module(f"moe_lab.exported_code.{port.file}")
    _config = getattr(_module, f"{port.base}Config")
    AutoConfig.register(kind, _config, exist_ok=True)
    AutoModelForCausalLM.register(
        _config, getattr(_module, f"{port.base}ForCausalLM"), exist_ok=True
    )
