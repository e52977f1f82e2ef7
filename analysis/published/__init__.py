"""Numbers that the papers publish, and tables that compare a study with them."""
