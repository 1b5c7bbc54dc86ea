"""`dataplane watch`: show live who waits for whom, in a terminal or on a page in a browser.

One process asks the plane, however many viewers there are. `picture` computes figures from events
and stats and does no I/O. `server` serves the page. `terminal` prints the same figures as text.
"""
