"""Rendering of tables, figures and pages, and their files."""
