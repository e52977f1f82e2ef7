"""Tables, figures and pages as files."""
