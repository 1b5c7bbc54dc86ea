"""The events of a plane: the ring of records that each peer keeps, the list merged from all rings,
and a follower that reads it again and again.

No I/O. `dataplane.timeline` explains steps by them.
"""
