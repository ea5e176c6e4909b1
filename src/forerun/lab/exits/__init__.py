"""Settings of early exits: exact counts, costs, search."""
