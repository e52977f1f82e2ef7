"""A study in a store as data frames."""
