"""The partitions that this peer serves, as primary or backup: commands to their stores, claims that
wait, appends to the backup, second copies of values."""
