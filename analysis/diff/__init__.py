"""Differences between two studies, stores or plans."""
