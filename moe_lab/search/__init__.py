"""Searches for plans that run the model: evolution of schedules, exhaustive choice, sequential
pruning, ablation."""
