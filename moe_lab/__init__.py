"""moe_lab: score, prune and evaluate Mixture-of-Experts language models."""

__version__ = "0.1.0"
