"""The shipped models, benchmarks and texts of a generated closed world, in `data/`; `tools/pocket`
makes them."""
