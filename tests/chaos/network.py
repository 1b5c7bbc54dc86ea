"""The network between the hosts of a test: an asyncio switch that can be slow, cut or corrupt.

Every host has a network namespace with one TUN device; what it sends arrives here as IP packets,
and goes on to whom it is for. Runs in a thread of the test process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
from dataclasses import dataclass

from tests.chaos.inside import MTU

MAX_QUEUED = 2048
"""Packets under way on one link; more are dropped, as routers do."""
BURST = 64
TCP = 6
FIN, SYN, RST, ACK = 1, 2, 4, 16


@dataclass(frozen=True, slots=True)
class Weather:
    """What becomes of packets to and from one host. queued: more packets than this on one link are
    dropped. corrupt: one control packet in so many has a byte changed, its checksum made right; 0:
    none. rejects: a firewall answers TCP packets "to" or "from" the host, or "both", with a reset;
    "": none."""

    delay_s: float = 0.0
    bytes_per_s: float = float("inf")
    queued: int = MAX_QUEUED
    cut: bool = False
    corrupt: int = 0
    rejects: str = ""


FAIR = Weather()


class Switch:
    def __init__(self, control_port: int) -> None:
        self._control_port = control_port.to_bytes(2, "big")
        self._ports: dict[bytes, int] = {}
        self._weather: dict[bytes, Weather] = {}
        self._free_at: dict[tuple[bytes, bytes], float] = {}
        self._queued: dict[tuple[bytes, bytes], int] = {}
        self._seen = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="switch")
        self._thread.start()

    def start(self, address: str, command: list[str], log: str) -> subprocess.Popen[bytes]:
        """A process at this address."""
        ours, theirs = socket.socketpair()
        inside = [sys.executable, "-m", "tests.chaos.inside", str(theirs.fileno()), address]
        with ours, open(log, "ab") as out:
            with theirs:
                process = subprocess.Popen(
                    [*inside, *command], pass_fds=[theirs.fileno()], stdout=out, stderr=out
                )
            ours.settimeout(60)
            try:
                _, found, _, _ = socket.recv_fds(ours, 1, 1)
            except BaseException:
                process.kill()
                process.wait()
                raise
        if not found:
            process.wait()
            raise PermissionError("this machine lets tests make no networks of their own")
        (tun,) = found
        os.set_blocking(tun, False)
        self._call(self._plug, socket.inet_aton(address), tun)
        return process

    def set(self, address: str, weather: Weather) -> None:
        self._call(self._weather.__setitem__, socket.inet_aton(address), weather)

    def close(self) -> None:
        for host in list(self._ports):
            self._call(self._unplug, host)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, act: object, *args: object) -> None:
        done = threading.Event()

        def run() -> None:
            act(*args)  # type: ignore[operator]
            done.set()

        self._loop.call_soon_threadsafe(run)
        assert done.wait(20), "the switch stands still"

    def _plug(self, host: bytes, tun: int) -> None:
        if host in self._ports:
            self._unplug(host)
        self._ports[host] = tun
        self._loop.add_reader(tun, self._read, host, tun)

    def _unplug(self, host: bytes) -> None:
        tun = self._ports.pop(host)
        self._loop.remove_reader(tun)
        os.close(tun)

    def _read(self, host: bytes, tun: int) -> None:
        for _ in range(BURST):
            try:
                packet = os.read(tun, MTU + 100)
            except BlockingIOError:
                return
            except OSError:  # its namespace is gone
                self._unplug(host)
                return
            if packet[0] >> 4 == 4 and packet[16:20] in self._ports:
                self._forward(packet[12:16], packet[16:20], bytearray(packet))

    def _forward(self, source: bytes, sink: bytes, packet: bytearray) -> None:
        ways = [self._weather.get(host, FAIR) for host in (source, sink)]
        link = source, sink
        if ways[0].rejects in ("from", "both") or ways[1].rejects in ("to", "both"):
            if (refusal := reset_of(packet)) is not None:
                self._deliver(source, refusal)
            return
        if any(way.cut for way in ways) or self._queued.get(link, 0) >= min(
            way.queued for way in ways
        ):
            return
        if every := max(way.corrupt for way in ways):
            self._corrupt(packet, every)
        now = self._loop.time()
        start = max(now, self._free_at.get(link, 0.0))
        self._free_at[link] = start + len(packet) / min(way.bytes_per_s for way in ways)
        at = self._free_at[link] + max(way.delay_s for way in ways)
        if at <= now + 1e-4:
            self._deliver(sink, packet)
            return
        self._queued[link] = self._queued.get(link, 0) + 1
        self._loop.call_at(at, self._arrive, link, packet)

    def _arrive(self, link: tuple[bytes, bytes], packet: bytearray) -> None:
        self._queued[link] -= 1
        self._deliver(link[1], packet)

    def _deliver(self, sink: bytes, packet: bytearray) -> None:
        with contextlib.suppress(OSError):  # full, or gone: the packet is lost
            if sink in self._ports:
                os.write(self._ports[sink], packet)

    def _corrupt(self, packet: bytearray, every: int) -> None:
        """Change the last byte of one packet in so many of the control channel."""
        header = (packet[0] & 15) * 4
        if packet[9] != TCP or self._control_port not in (
            bytes(packet[header : header + 2]),
            bytes(packet[header + 2 : header + 4]),
        ):
            return
        payload = header + (packet[header + 12] >> 4) * 4
        if payload >= len(packet):
            return
        self._seen += 1
        if self._seen % every:
            return
        at = len(packet) - 1
        word = at - (at - header) % 2  # checksums are of 16-bit words from the TCP header on
        before = int.from_bytes(packet[word : word + 2].ljust(2, b"\0"), "big")
        packet[at] ^= 0x55
        after = int.from_bytes(packet[word : word + 2].ljust(2, b"\0"), "big")
        field = header + 16
        check = ~int.from_bytes(packet[field : field + 2], "big") & 0xFFFF
        total = check + (~before & 0xFFFF) + after  # RFC 1624
        total = (total & 0xFFFF) + (total >> 16)
        total = (total & 0xFFFF) + (total >> 16)
        packet[field : field + 2] = (~total & 0xFFFF).to_bytes(2, "big")


def reset_of(packet: bytearray) -> bytearray | None:
    """The TCP reset with which a firewall rejects a packet; None for what is answered by none."""
    start = (packet[0] & 15) * 4
    if packet[9] != TCP or packet[start + 13] & RST:
        return None
    ports = packet[start + 2 : start + 4] + packet[start : start + 2]
    sequence, acknowledged, flags = struct.unpack_from("!IIxB", packet, start + 4)
    if flags & ACK:
        rest = struct.pack("!IIBBHHH", acknowledged, 0, 5 << 4, RST, 0, 0, 0)
    else:
        length = len(packet) - start - (packet[start + 12] >> 4) * 4
        behind = (sequence + length + bool(flags & SYN) + bool(flags & FIN)) & 0xFFFFFFFF
        rest = struct.pack("!IIBBHHH", 0, behind, 5 << 4, RST | ACK, 0, 0, 0)
    tcp, addresses = bytearray(ports + rest), packet[16:20] + packet[12:16]
    tcp[16:18] = _checksum(addresses + struct.pack("!HH", TCP, len(tcp)) + tcp)
    header = bytearray(struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(tcp), 0, 0, 64, TCP, 0))
    header += addresses
    header[10:12] = _checksum(header)
    return header + tcp


def _checksum(data: bytes | bytearray) -> bytes:
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return struct.pack("!H", ~total & 0xFFFF)
