"""What happened in a plane, and when: each peer's ring of records, and one list made of all rings.
No I/O."""
