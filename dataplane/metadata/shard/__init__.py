"""One partition as a state machine: commands come in (`store`); replies, records for the backup and
effects go out.

No I/O and no clock: values are only references, and time is an argument.
"""
