"""One module for each harness, with its object `HARNESS`. The name of the module is that of the
harness in settings."""
