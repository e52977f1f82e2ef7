"""Statistics over the results of a study: intervals, tests, ranks, winners, overlap."""
