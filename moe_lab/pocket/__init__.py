"""Pocket: a generated closed world, a small model trained on it, three calibration sets and sixteen benchmarks."""
