"""What a checkpoint asks for once."""

from __future__ import annotations

from dataplane.client._sync.save import _each_once

A, B, C = (bytes([digit]) * 16 for digit in (1, 2, 3))


def test_a_name_that_two_peers_told_is_taken_from_the_last() -> None:
    assert _each_once([A + B, b"", B + C, b""]) == [A, b"", B + C, b""]
    assert _each_once([A + A, B, b"", B]) == [A, b"", b"", B]
    assert _each_once([A, B, C, b""]) == [A, B, C, b""]
