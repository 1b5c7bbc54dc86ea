"""`plane.checkpoint` and `plane.restore`: rows out of a plane into a directory, and back."""
