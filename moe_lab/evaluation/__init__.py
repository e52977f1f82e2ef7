"""Benchmarks: suites, adapters of harnesses, text generation, judges, and the sandbox for programs a model wrote."""
