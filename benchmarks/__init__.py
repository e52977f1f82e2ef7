"""Speed and memory, measured against reference ways as ratios within one run."""
