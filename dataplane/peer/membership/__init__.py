"""Joining a run, keeping its roster, and leaving it."""
