"""Bytes of other hosts, brought here once: which transport, which way, and what is cached."""
