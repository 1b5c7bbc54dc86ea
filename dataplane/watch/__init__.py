"""`dataplane watch`: who waits for whom, in a terminal or on a page in a browser, as it happens.

One process asks the plane, however many people look at it. `picture` makes figures of events and
stats and does no I/O; `server` serves the page, `terminal` prints the same figures as text.
"""
