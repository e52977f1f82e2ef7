"""Serving of pruned models by vLLM."""
