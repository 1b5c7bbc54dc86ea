"""The partitions that this peer serves, as primary or backup: commands to their stores, waiting
claims, log records for the backup, and replicas of values."""
