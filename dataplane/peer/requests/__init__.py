"""What a client asks of its peer, from its request to its answer: bytes are committed here, the
shard is asked, wherever it is."""
