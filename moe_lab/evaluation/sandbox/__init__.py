"""Sandbox for programs that a model wrote: no network, no writable files, no view of other
processes."""
