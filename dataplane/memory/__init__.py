"""The host arena: its free space, the grants of each client, the live chunks, and how clients map
them."""
