"""Makes what moe_lab/pocket/data holds: a closed world, models trained on text about it, benchmarks
and texts.

    python -m tools.pocket.build             # benchmarks, calibration sets, texts for searches
    python -m tools.pocket.train NAME        # one model, such as olmoe
    python -m tools.pocket.card NAME SCORES  # the model's README.md

The first takes seconds, a model ten minutes to an hour on one CPU thread.
"""
