"""The library inside a stage worker: connect, Plane, Partition, Batch, Ref.

Talks only to the peer of its own host, over a unix socket, and maps that peer's arena.
"""
