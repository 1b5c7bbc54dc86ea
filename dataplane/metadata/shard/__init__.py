"""One partition as a state machine: it takes commands (`store`), and returns replies, records for
the backup and effects. No I/O and no clock: values are only references, and time is an argument.
"""
