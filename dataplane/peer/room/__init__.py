"""Space in the arenas: who gets it, who waits, what is spilled, and when a wait is a deadlock."""
