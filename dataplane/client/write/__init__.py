"""Values on their way into the arena: encoded, laid out, copied."""
