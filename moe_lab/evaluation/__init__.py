"""Suites, harness adapters, and the confinement that programs written by a model run in."""
