"""What a user may call, as generators without I/O: they yield steps, `aio` and `sync` do them."""
