"""Every table and figure, one module per subject."""
