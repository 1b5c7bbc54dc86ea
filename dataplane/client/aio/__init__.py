"""The public classes with `await`.

`make sync` generates the blocking classes in `sync` from these modules, except `driver`.
"""
