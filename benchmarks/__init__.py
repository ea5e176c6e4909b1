"""Measurements on the shipped pair. `python -m benchmarks.run --help`."""
