"""The host arena: who may write where, which ranges are alive, and how clients map them."""
