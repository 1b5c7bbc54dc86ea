"""Room in the arenas: who gets it, who waits, what is spilled, and when waiting is a deadlock."""
