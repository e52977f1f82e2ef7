"""What is read of transformers' source as text is what it says when it is imported."""

from __future__ import annotations

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from moe_lab.models.families import PORTS, has_causal_model


def test_families_with_a_causal_language_model() -> None:
    kinds = [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *PORTS]
    assert len(kinds) > 100 and all(map(has_causal_model, kinds))
    assert not any(map(has_causal_model, ("homemade", "vit", "PreTrainedModel", "")))
