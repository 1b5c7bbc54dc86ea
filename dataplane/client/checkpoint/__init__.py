"""Files of `plane.checkpoint` and `plane.restore`."""
