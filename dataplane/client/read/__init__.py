"""Columns of fetched rows as numpy, torch and Arrow know them."""
