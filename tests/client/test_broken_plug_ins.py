"""Installed packages whose import fails: what they bring is missing, and the rest goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dataplane import Plane
from dataplane.errors import DataplaneError, DeviceMissing, TransportMissing
from dataplane.gpu import registry as devices
from dataplane.transport import registry as transports
from dataplane.wire.messages import Stats, StatsDone
from dataplane.wire.tables import PoolHandle
from tests.client.scripted_peer import ScriptedPeer


@pytest.fixture(autouse=True)
def cracked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that brings a device and a transport, and raises when it is imported."""
    (tmp_path / "cracked_plug_in.py").write_text("raise RuntimeError('no driver')")
    about = tmp_path / "cracked_plug_in-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: cracked-plug-in\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[dataplane.devices]\ncracked = cracked_plug_in:Cracked\n"
        "[dataplane.transports]\ncracked = cracked_plug_in:Cracked\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize(
    ("load", "error"), [(devices.load, DeviceMissing), (transports.load, TransportMissing)]
)
def test_a_plug_in_that_raises_anything_is_missing_and_named(
    load: Callable[[str], object], error: type[DataplaneError]
) -> None:
    told = r"'cracked' \(cracked_plug_in:Cracked\): RuntimeError: no driver. Reinstall"
    with pytest.raises(error, match=told):
        load("cracked")


def test_a_client_connects_although_the_peers_device_does_not_load_here(
    peer: ScriptedPeer, caplog: pytest.LogCaptureFixture
) -> None:
    peer.welcome.pools = [PoolHandle("cracked", "cracked:0", b"", 0, 4096)]
    peer.scripts[Stats] = lambda r, b: StatsDone({"alive": True})
    with Plane(peer.keeper()) as plane:
        assert plane.stats() == {"alive": True}
    assert "device cracked:0: copying values through the host arena" in caplog.text
    caplog.clear()  # the traceback of the error in the record holds the frames of connecting
