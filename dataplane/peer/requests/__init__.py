"""Handlers of clients' requests: they commit bytes here and ask the shard, wherever it is."""
