"""The client, with `await`. Everything that waits for the peer is written here once.

`make sync` generates `_sync`, the blocking client, from these modules. Only `backend` has a
hand-written twin: how to exchange frames, run copies, prefetch and connect. No other module here
may use asyncio, threads or sockets.
"""
