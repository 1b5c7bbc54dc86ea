"""The metadata of rows: stores, rosters and tables. Sans-I/O; time is an argument."""
