"""What changed between two studies, stores or plans."""
