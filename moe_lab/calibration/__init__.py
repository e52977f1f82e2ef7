"""What a model reads while it is scored: sources of documents, packing into rows, batches with a validity mask."""
