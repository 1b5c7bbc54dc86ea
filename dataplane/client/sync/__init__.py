"""The public classes without `await`. Only `driver` is written by hand: the others are made of
their namesakes in `aio` by `make sync`, and a test sees that they are as new.
"""
