"""Clients of this host: let in, their requests counted, carried out once and answered."""
