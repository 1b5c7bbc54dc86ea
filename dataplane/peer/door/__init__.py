"""The socket for clients of this host: accepting clients, running each request once, and
replying."""
