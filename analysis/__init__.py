"""Tables, figures and the report, made from a store of results with pandas and without torch."""
