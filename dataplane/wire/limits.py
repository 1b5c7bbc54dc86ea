"""The named limits of the protocol, enforced before memory is allocated."""

from __future__ import annotations

PROTOCOL_VERSION = 1
PROTOCOL_VERSION_MIN = 1

SHARDS = 4096
"""Units of placement in a plane. Peers with another number refuse each other."""

MAX_MEMBERS = 4_096
"""Peers of a plane."""

MAX_FRAME_BYTES = 64 << 20
MAX_ROWS_PER_MESSAGE = 65_536
MAX_OPS_PER_MESSAGE = 65_536
"""Operations that are shipped to a backup at once."""
MAX_LOST_PER_MESSAGE = 4_096
"""Names of lost rows that are told at once."""
MAX_CHANGES_ABOVE_FLOOR = 1_024
"""Changes of a partition that a caller may repeat, which the shard remembers."""
MAX_FIELDS = 64
MAX_TAGS = 64
MAX_STAGES = 16
MAX_NAME_BYTES = 512
MAX_RANKS = 65_536
"""Ranks of a trainer that share a plan, and processes that take part in it."""
MAX_PLAN_PARTS = 262_144
"""Ranks times mini-batches of a plan: each process lays out all of them."""
MAX_RANK = 16
MAX_LEAVES_PER_ROW = 4_096
MAX_HEAD_BYTES = (1 << 32) - 1
"""Of an object, without its arrays."""
MAX_NESTING = 64
MAX_WHERE_NODES = 256
MAX_CONNECTIONS = 4_096
MAX_HELLO_BYTES = 65_536
"""A frame of a client that has no session yet."""
MAX_REQUESTS_PER_CONNECTION = 64
MAX_BYTES_UNDER_WAY = 256 << 20
"""At one door: of larger messages that are coming in, or (between peers) are being answered."""

ALIGNMENT_BYTES = 64
"""Every range starts at a multiple of this."""

INLINE_ROW_BYTES = 4_096
"""What one put or finish brings for a row with the message, to live in the shard; its other values
go to the arena."""
MAX_CHUNKS_PER_MESSAGE = 4_096
MAX_PIECES_PER_MESSAGE = 65_536
MAX_CHUNKS_PER_RESTORE = MAX_PIECES_PER_MESSAGE
"""A group comes back whole, also where many puts and adds have brought it."""
MAX_LAYOUT_BYTES = 4_096

NO_GROUP = 0xFFFF_FFFF
MAX_PULLED_BYTES = 262_144
"""Of values that a peer sends in one answer; more go through bulk transfer."""
