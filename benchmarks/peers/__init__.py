"""Runners of other implementations for `forerun bench --peers`; each behind a pipe, see `run`."""
