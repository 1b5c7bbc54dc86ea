"""The columns of which a shard is made: rows by key, fields, small values, tags, groups. They know
nothing of leases or stages."""
