"""The blocking client. `make sync` generates all but `backend` from `_async`; a test compares."""
