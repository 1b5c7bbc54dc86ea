"""What a read of UCX is cut into, and what is said where no binding of UCX is installed."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest

from dataplane.errors import ProtocolError, TransportMissing
from dataplane.transport.engines import ucx
from dataplane.transport.engines.ucx import PIECE_BYTES, _pieces


def columns(*triples: tuple[int, int, int]) -> list[np.ndarray]:
    return [np.array(column, np.uint64) for column in zip(*triples, strict=True)]


def test_neighbours_on_both_sides_are_read_as_one_and_others_are_not() -> None:
    dests, sources, sizes = _pieces(
        *columns((0, 1000, 64), (64, 1064, 64), (128, 2000, 8), (200, 2008, 8))
    )
    assert list(zip(dests, sources, sizes, strict=True)) == [
        (0, 1000, 128),
        (128, 2000, 8),
        (200, 2008, 8),
    ]


def test_long_stretches_are_cut_and_every_byte_is_read_once() -> None:
    rng = np.random.default_rng(3)
    sizes = rng.integers(1, 3 * PIECE_BYTES, 50).astype(np.uint64)
    ends = np.cumsum(sizes)
    sources, dests = ends - sizes, (ends - sizes)[::-1] + np.uint64(7)
    got_dests, got_sources, got_sizes = _pieces(dests, sources, sizes)
    assert int(got_sizes.max()) <= PIECE_BYTES and int(got_sizes.min()) > 0
    assert int(got_sizes.sum()) == int(sizes.sum())
    of = np.searchsorted(ends, got_sources, "right")
    assert np.array_equal(got_dests - dests[of], got_sources - sources[of])
    order = np.argsort(got_sources)
    assert np.array_equal(got_sources[order][1:], (got_sources + got_sizes)[order][:-1])


def test_an_old_sites_ucp_is_taken_where_ucxx_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = ModuleType("ucp._libs.ucx_api")
    monkeypatch.setitem(sys.modules, "ucxx", None)
    monkeypatch.setitem(sys.modules, "ucxx._lib", None)
    for name in ("ucp", "ucp._libs"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, old.__name__, old)
    assert ucx._binding() is old
    monkeypatch.delitem(sys.modules, old.__name__)
    with pytest.raises(TransportMissing, match="neither ucxx nor ucp"):
        ucx._binding()


def test_a_card_of_something_else_is_refused() -> None:
    with pytest.raises(ProtocolError, match="an invalid ucx card"):
        ucx._card(b"\x93\x01\x02\x03")
