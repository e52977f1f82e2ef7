"""Running programs that a model wrote, without network, writable files or a view of other processes."""
