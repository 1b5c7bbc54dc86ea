"""A peer's stats, metrics and events, and its periodic work."""
