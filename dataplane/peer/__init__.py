"""The service of one host: local door, peer door, grants and claims, pulls, bulk workers."""
