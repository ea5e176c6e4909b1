"""Measuring and predicting: traces and replay, costs, bounds, tuning, audit, bench, exits."""
