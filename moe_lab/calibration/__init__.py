"""Calibration sets: sources of documents, packing into rows, batches with a validity mask."""
