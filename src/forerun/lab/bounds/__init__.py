"""Bounds on a trace: the clairvoyant oracle and the informed bound."""
