"""Training of exit heads and their features."""
