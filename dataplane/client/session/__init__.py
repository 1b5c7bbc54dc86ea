"""One client's session: its connections to the peer, its leases and memory there, and its end."""
