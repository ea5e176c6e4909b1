"""Record once, replay any policy: traces, costs, replay, and tuning on them."""
