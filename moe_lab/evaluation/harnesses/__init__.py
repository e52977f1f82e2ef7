"""Adapters of benchmark harnesses, one module each: the questions they ask and how they grade
answers."""
