"""All tables and figures, one module per subject."""
