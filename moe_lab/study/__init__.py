"""Run a study: its cells become a graph of distinct steps; each step is content-addressed, cached
and restartable."""
