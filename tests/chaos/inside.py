"""Runs a command in a network of its own: `python -m tests.chaos.inside FD ADDRESS COMMAND…`.

The other end of that network, a TUN descriptor, goes to whoever has the other end of socket FD.
Needs CAP_NET_ADMIN and CAP_SYS_ADMIN; exit code 3 where they are missing.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import sys

CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
MTU = 9000
NOT_ALLOWED = 3


def main(descriptor: int, address: str, command: list[str]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET):
        sys.exit(NOT_ALLOWED)
    try:
        tun = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH", b"tun0", IFF_TUN | IFF_NO_PI))
    except OSError:
        sys.exit(NOT_ALLOWED)
    for words in (
        f"addr add {address}/24 dev tun0",
        f"link set tun0 up mtu {MTU}",
        "link set lo up",
    ):
        subprocess.run(["ip", *words.split()], check=True)
    with socket.socket(fileno=descriptor) as control:
        socket.send_fds(control, [b"\0"], [tun])
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
