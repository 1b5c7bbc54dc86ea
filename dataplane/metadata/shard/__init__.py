"""One partition: commands come in (`store`), answers, records for the backup and effects go out.
No I/O, no clock: bytes are only named, time is an argument."""
