"""Steps, as the events of a plane show them: who waited for whom, why a step took so long, a trace,
and a recording.

No I/O.
"""
