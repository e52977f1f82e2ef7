"""One module for each harness, with its object `HARNESS`; the module's name is that of the harness
in settings."""
