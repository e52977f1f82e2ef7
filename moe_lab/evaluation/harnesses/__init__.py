"""One module per benchmark harness: what it asks and how it grades."""
