"""The public classes with `await`, written here once: `sync` is made of these modules, save for
`driver`, by `make sync`.
"""
