"""`dataplane status` as people read it."""

from __future__ import annotations

from typing import Any

from dataplane import cli_status


def stage(**figures: int) -> dict[str, int]:
    names = ("ready_rows", "ready_groups", "leased_rows", "acked_rows")
    return dict.fromkeys(names, 0) | figures


def partition(rows: int, phase: str, **stages: dict[str, int]) -> dict[str, Any]:
    return {
        "rows": rows,
        "groups": rows // 4,
        "bytes": rows << 20,
        "phase": phase,
        "stages": stages,
        "admission": {},
    }


ADMISSION = {"version": 7, "lag": 1, "permits": 3, "unfinished_groups": 5}
PLAN = {"ranks": 40, "came": 3, "acked": 1, "working": [0, 2], "absent": [1, *range(4, 20)]}
ADMISSION |= {"finished_groups": 2, "held_groups": 0, "places": 16}


def wait(**changes: Any) -> dict[str, Any]:
    plain = {"kind": "claim", "partition": "step-3", "stage": "train", "calls": 8, "peer": "b"}
    return plain | {"for_s": 95.0, "why": "0 of 2 groups ready, 4 wanted"} | changes


PEERS: dict[str, Any] = {
    "a": {
        "peer": "a",
        "peers": {
            "a": {"used_bytes": 3 << 30, "size_bytes": 4 << 30, "rows": 8, "clients": 3},
            "bb": {"error": "it is away"},
        },
        "everywhere": {
            "partitions": {
                "step-10": partition(0, "sealed", train=stage(acked_rows=64)),
                "step-2": partition(0, "sealed", train=stage(acked_rows=64)),
                "step-3": partition(
                    8,
                    "open",
                    reward=stage(ready_rows=3, leased_rows=5, acked_rows=10),
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
                }
            ],
        },
    },
    "c": {"error": "it is stopped"},
}


def test_what_is_stuck_comes_first_then_hosts_then_a_line_a_stage() -> None:
    shown = list(cli_status.lines(PEERS, {("step-3", "reward"): 31.25}))
    assert shown == [
        "  ! claim of 'step-3', stage 'train': 8 calls wait on b, 95 s: 0 of 2 groups ready, "
        "4 wanted",
        "  ! peer c does not answer: it is stopped",
        "  host a   [###############.....]  75% of 4.0 GiB, 8 rows, 2 clients",
        "  host bb  does not answer: it is away",
        "  partition step-3  open, 8 rows, 2 groups, 8.0 MiB",
        "    admit: version 7, lag 1 | 10 of 16 places taken, 3 of them by permits",
        "    reward  3 ready | 5 leased: 5 by pid 7 on host b for 5 min | 1 call waits, the oldest "
        "2 s | 31.2 rows/s",
        "    train   4 ready (1 whole group) | 0 leased | plan: 1 of 40 ranks acked, working: 0, "
        "2, not come: 1, 4, 5, 6, 7, 8, 9, 10 … | 8 calls wait, the oldest 95 s",
        "  2 drained partitions: step-2, step-10",
    ]
    assert cli_status.acked(PEERS)["step-3", "reward"] == 10


def test_a_run_of_which_no_peer_answers_is_shown_too() -> None:
    assert list(cli_status.lines({"c": {"error": "gone"}}, {})) == [
        "  ! peer c does not answer: gone"
    ]
