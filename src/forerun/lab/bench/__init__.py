"""Methods and other implementations side by side, and the report of it."""
