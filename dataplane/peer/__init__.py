"""The service of one host: the doors for clients and peers, reservations, claims, pulls and bulk
workers."""
