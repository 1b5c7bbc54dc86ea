"""`dataplane status` as people read it."""

from __future__ import annotations

from typing import Any

import pytest

from dataplane import cli_status
from dataplane.errors import ProtocolError


def stage(**figures: float) -> dict[str, float]:
    names = ("ready_rows", "ready_groups", "leased_rows", "acked_rows", "acked_rows_per_s")
    return dict.fromkeys((*names, "released_rows", "redelivered_rows"), 0) | figures


def partition(rows: int, phase: str, **stages: dict[str, Any]) -> dict[str, Any]:
    return {
        "rows": rows,
        "groups": rows // 4,
        "bytes": rows << 20,
        "phase": phase,
        "stages": stages,
        "admission": {},
        "lost_rows": 0,
    }


ADMISSION = {"version": 7, "lag": 1, "permits": 3, "unfinished_groups": 5}
PLAN = {"ranks": 40, "came": 3, "acked": 1, "working": [0, 2], "absent": [1, *range(4, 20)]}
ADMISSION |= {"finished_groups": 2, "held_groups": 0, "slots": 16}


def client(label: str, **changes: Any) -> dict[str, Any]:
    sums = ("leases", "leased_rows", "waiting_calls", "granted_bytes", "pinned_bytes")
    plain = {"client": label, "command": "python a.py", "rank": -1, "peer": "a", "age_s": 65.0}
    return plain | dict.fromkeys(sums, 0) | changes


def wait(**changes: Any) -> dict[str, Any]:
    plain = {"kind": "claim", "partition": "step-3", "stage": "train", "calls": 8, "peer": "b"}
    return plain | {"for_s": 95.0, "why": "0 of 2 groups ready, 4 wanted"} | changes


PEERS: dict[str, Any] = {
    "a": {
        "peer": "a",
        "peers": {
            "a": {
                "used_bytes": 3 << 30,
                "size_bytes": 4 << 30,
                "rows": 8,
                "clients": 3,
                "rates": {"put_rows_per_s": 12.0, "acked_rows_per_s": {"reward": 7.9, "train": 0}},
            },
            "bb": {"error": "it is away"},
        },
        "everywhere": {
            "partitions": {
                "step-10": partition(0, "sealed", train=stage(acked_rows=64)),
                "step-11": partition(0, "sealed") | {"lost_rows": 5},
                "step-2": partition(0, "sealed", train=stage(acked_rows=64)),
                "step-3": partition(
                    8,
                    "open",
                    reward=stage(
                        ready_rows=3,
                        leased_rows=5,
                        acked_rows=10,
                        acked_rows_per_s=31.25,
                        released_rows=6,
                        redelivered_rows=4,
                    ),
                    train=stage(ready_rows=4, ready_groups=1) | {"plan": PLAN},
                )
                | {"admission": ADMISSION},
            },
            "waits": [wait(), wait(kind="wait", stage="reward", for_s=2.0, calls=1)],
            "holders": [
                {
                    "partition": "step-3",
                    "stage": "reward",
                    "holder": "pid 7 on host b",
                    "rows": 5,
                    "for_s": 300.0,
                    "command": "python reward.py --fast",
                    "rank": 3,
                    "host": "b",
                }
            ],
            "clients": [
                client("pid 9 on host a", leased_rows=1, waiting_calls=2, pinned_bytes=3 << 20),
                *(client(f"pid {pid} on host a", rank=pid) for pid in range(100, 117)),
            ],
        },
    },
    "c": {"error": "it is stopped"},
}


def test_what_is_stuck_comes_first_then_hosts_then_a_line_a_stage() -> None:
    shown = list(cli_status.lines(PEERS))
    ranks = [
        f"    pid {pid} on host a, rank {pid} (python a.py), for 65 s" for pid in range(100, 115)
    ]
    assert shown == [
        "  ! claim of 'step-3', stage 'train': 8 calls have been waiting on b for "
        "95 s: 0 of 2 groups ready, 4 wanted",
        "  ! peer c does not answer: it is stopped",
        "  host a   [###############.....]  75% of 4.0 GiB, 8 rows, 2 clients | rows/s: put "
        "12.0, reward 7.9, train 0.0",
        "    pid 9 on host a (python a.py), for 65 s, 1 row leased, 2 waiting calls, holds 3.0 MiB",
        *ranks,
        "    and 2 more clients",
        "  host bb  does not answer: it is away",
        "  partition step-3  open, 8 rows, 2 groups, 8.0 MiB",
        "    admit: version 7, lag 1 | 10 of 16 slots taken, 3 of them by permits",
        "    reward  3 ready | 5 leased: 5 by pid 7 on host b, rank 3 (python reward.py --fast) "
        "for 5 min | 1 waiting call, the oldest for 2 s | 6 released, 4 redelivered | 31.2 rows/s",
        "    train   4 ready (1 whole group) | 0 leased | plan: 1 of 40 ranks acked, working: 0, "
        "2, not joined: 1, 4, 5, 6, 7, 8, 9, 10 … | 8 waiting calls, the oldest for 95 s",
        "  partition step-11  sealed, 0 rows, 0 B",
        "    ! 5 rows were lost with a peer: part.lost() lists them",
        "  2 drained partitions: step-2, step-10",
    ]


def test_a_run_of_which_no_peer_answers_is_shown_too() -> None:
    assert list(cli_status.lines({"c": {"error": "gone"}})) == ["  ! peer c does not answer: gone"]


def test_statistics_of_another_release_are_refused_in_one_line() -> None:
    with pytest.raises(ProtocolError, match=r"no entry 'peer'\. Install the same"):
        cli_status.lines({"a": {"everywhere": {"partitions": {}}, "peers": {"a": {}}}})
    with pytest.raises(ProtocolError, match=r"no entry 'waits'\. Install the same"):
        cli_status.alone({"partitions": {}, "peer": "a", "peers": {"a": {}}})
