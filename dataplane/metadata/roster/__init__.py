"""Who the members are and which serves which partitions: the table, the authority that makes the
next one, and who counts as lost. No I/O."""
