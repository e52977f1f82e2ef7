"""Benchmarks of speed and memory, as ratios to reference implementations measured in the same
run."""
