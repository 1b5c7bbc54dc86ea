"""The columns of a shard: rows by key, fields, small values, tags, groups. They do not depend on
leases or stages."""
