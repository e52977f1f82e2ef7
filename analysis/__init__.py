"""Tables, maps and the report made from a store of results: pandas only, never torch."""
