"""Bounds on a trace: the clairvoyant oracle and the informed bound."""

from forerun.lab.bounds.bounds import best_fixed, oracle

__all__ = ["best_fixed", "oracle"]
