"""Code that lies beside the weights of exports whose layers differ, and needs torch and transformers alone.

`ragged` is also what a model in memory is pruned to.
"""
