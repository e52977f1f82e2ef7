"""What made files that are shipped; part of a checkout, not of the installed package."""
