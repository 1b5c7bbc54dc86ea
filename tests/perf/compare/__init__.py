"""`python -m bench compare`: the same batch through several planes, in one run."""
