"""The host arena: who may write where, which chunks are alive, and how clients map them."""
