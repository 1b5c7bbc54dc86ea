"""One client's connections to its peer, what it holds there, and how it ends."""
