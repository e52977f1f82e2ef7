"""Allocations that are found by trying them: candidates are masks on the loaded model."""
