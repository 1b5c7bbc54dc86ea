"""A discrete-event model of both designs, fitted on small runs and checked on larger ones.

It is then applied to clusters that no test machine has. Its results for those are a model, and
are labelled so.
"""
