"""Steps, as the events of a plane show them: which worker waited for which, why a step took long, a
trace, and a recording. No I/O.
"""
