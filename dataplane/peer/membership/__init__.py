"""Joining a plane, keeping its roster, leaving it."""
