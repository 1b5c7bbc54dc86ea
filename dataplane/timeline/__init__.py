"""The events of a plane: the ring of records that each peer keeps, and the list merged from all
rings.

No I/O.
"""
