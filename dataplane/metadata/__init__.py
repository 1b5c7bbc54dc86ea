"""What is known about rows: stores, homes, placement. Sans-I/O; time is an argument."""
