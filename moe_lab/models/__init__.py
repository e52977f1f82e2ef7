"""Models: their files, shapes, families and loading."""
