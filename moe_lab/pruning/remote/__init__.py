"""The code that lies beside the weights of a pruned checkpoint whose layers differ, and what generates it."""
