"""The named limits of the protocol, enforced before memory is allocated."""

from __future__ import annotations

PROTOCOL_VERSION = 1
PROTOCOL_VERSION_MIN = 1

SHARDS = 4096
"""Shards of a plane, the units of placement. Peers with different numbers refuse each other."""

MAX_MEMBERS = 4_096
"""The most peers of a plane."""

MAX_FRAME_BYTES = 64 << 20
MAX_ROWS_PER_MESSAGE = 65_536
MAX_LOG_RECORDS = 65_536
"""Log records of one partition in one message to its backup."""
MAX_LOST_PER_MESSAGE = 4_096
"""Keys of lost rows in one message."""
MAX_CHANGES_ABOVE_FLOOR = 1_024
"""Changes per caller and partition that the shard remembers, so that the caller can retry them."""
MAX_FIELDS = 64
MAX_TAGS = 64
MAX_STAGES = 16
MAX_NAME_BYTES = 512
MAX_RANKS = 65_536
"""The most ranks of a plan, and the most processes that join it."""
MAX_PLAN_PARTS = 262_144
"""Ranks times mini-batches of a plan. Each process computes all of them."""
MAX_RANK = 16
MAX_LEAVES_PER_ROW = 4_096
MAX_HEAD_BYTES = (1 << 32) - 1
"""The size of an object without its arrays."""
MAX_NESTING = 64
MAX_WHERE_NODES = 256
MAX_CONNECTIONS = 4_096
MAX_HELLO_BYTES = 65_536
"""The size of a frame from a client without a session."""
MAX_REQUESTS_PER_CONNECTION = 64
MAX_BYTES_UNDER_WAY = 256 << 20
"""The total size of large messages that one listener is receiving, or (between peers) answering."""

ALIGNMENT_BYTES = 64
"""Every chunk starts at a multiple of this."""

INLINE_ROW_BYTES = 4_096
"""Inline bytes per row and message, which are stored in the shard. Other values go to the arena."""
MAX_CHUNKS_PER_MESSAGE = 4_096
MAX_PIECES_PER_MESSAGE = 65_536
MAX_CHUNKS_PER_RESTORE = MAX_PIECES_PER_MESSAGE
"""A whole group must fit one message, even if many puts and acks wrote it."""
MAX_LAYOUT_BYTES = 4_096

MAX_EXTENTS_PER_SESSION = 16_384
"""Separate extents of the arena that one client may write into."""

NO_GROUP = 0xFFFF_FFFF
MAX_PULLED_BYTES = 262_144
"""Bytes of values in one reply between peers. Larger transfers use the bulk worker."""
