"""Columns of fetched rows, as NumPy arrays, torch tensors and Arrow tables."""
