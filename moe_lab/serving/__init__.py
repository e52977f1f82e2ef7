"""What was pruned, in a server."""
