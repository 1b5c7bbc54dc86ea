"""A discrete-event model of both designs: fitted on small runs, checked on larger ones.

Then it is carried to clusters that no test machine has. What it says of those is a model, and is
called one.
"""
