"""Measuring and proving: for now the exactness audit."""
