"""Which peers are members, and which serves which partitions: the table, the keeper that makes
the next one, and which members count as lost. No I/O."""
