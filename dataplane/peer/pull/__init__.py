"""Copying bytes of other hosts to this host, once: which transport, by which path, and what is
cached."""
