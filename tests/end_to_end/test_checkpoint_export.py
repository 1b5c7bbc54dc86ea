"""`dataplane checkpoint export`: what is in its files, read with pyarrow alone, and its errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataplane import Plane, cli
from dataplane.client.checkpoint import export


def exported(plane: Plane, folder: Path, *options: str) -> Path:
    """The directory with the files of a checkpoint of all that is in the plane."""
    plane.checkpoint(folder / "saved")
    assert cli.main(["checkpoint", "export", f"{folder}/saved", f"{folder}/out", *options]) == 0
    return folder / "out"


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line of a command that fails."""
    assert cli.main(["checkpoint", "export", *map(str, arguments)]) == 2
    said, error = capsys.readouterr()
    assert not said and error.count("\n") == 1 and error.startswith("dataplane: ")
    return error.removeprefix("dataplane: ").strip()


def test_rows_of_every_kind_are_read_with_pyarrow(plane: Plane, tmp_path: Path) -> None:
    part = plane.partition("step/12", {"train": ["tokens"]}, free="drop")
    image = np.arange(30_000, dtype=np.uint8)
    given: dict[str, Any] = {
        "tokens": [np.arange(n, dtype=np.int32) for n in (3, 0, 2_000)],
        "logits": np.arange(12, dtype=ml_dtypes.bfloat16).reshape(3, 2, 2),
        "image": [image] * 3,
        "text": ["größer", "", "x" * 5_000],
        "raw": [b"\0", b"", bytes(3_000)],
        "reward": np.array([0.5, np.nan, 1.5]),
        "calls": [{"name": "f", "at": [1, 2]}, {"name": "g", "at": []}, {"name": "h", "at": [3]}],
    }
    tags = {"version": [1, 2, 3], "score": [1, 0.5, 2], "any": [1, "a", True], "text": ["t"] * 3}
    part.put(given, key=[7, 8, 9], group="g", tags=tags, dedup=["image"])
    part.put({"tokens": [np.arange(5, dtype=np.int32)]}, key=[10])
    plane.partition("other", free="drop").put({"key": [1.5]}, key=["k"], group=4)
    out = exported(plane, tmp_path)
    assert sorted(os.listdir(out)) == ["other.parquet", "step%2F12.parquet"]
    assert pq.read_table(out / "other.parquet").to_pydict() == {
        "key": ["k"], "group": [4], "field.key": [1.5]
    }  # fmt: skip
    table = pq.read_table(out / "step%2F12.parquet")
    assert table.schema.metadata[b"partition"] == b"step/12"
    assert {name: str(table.schema.field(name).type) for name in table.column_names} == {
        "key": "int64",
        "group": "string",
        "tokens": "list<element: int32>",
        "logits": "list<element: list<element: float>>",
        "image": "list<element: uint8>",
        "text": "string",
        "raw": "binary",
        "reward": "double",
        "calls": "struct<name: string, at: list<element: int64>>",
        "version": "int64",
        "score": "double",
        "any": "string",
        "tag.text": "string",
    }
    rows = sorted(table.to_pylist(), key=lambda row: row["key"])
    assert [row["key"] for row in rows] == [7, 8, 9, 10]
    assert [row["group"] for row in rows] == ["g", "g", "g", None]
    assert [row["any"] for row in rows] == ["1", '"a"', "true", None]
    assert [row["score"] for row in rows] == [1.0, 0.5, 2.0, None]
    for n, row in enumerate(rows[:3]):
        assert row["tokens"] == given["tokens"][n].tolist() and row["image"] == image.tolist()
        assert row["logits"] == given["logits"][n].astype(np.float32).tolist()
        assert [row[name] for name in ("text", "raw", "calls")] == [
            given[name][n] for name in ("text", "raw", "calls")
        ]
    assert np.isnan(rows[1]["reward"]) and (rows[0]["reward"], rows[2]["reward"]) == (0.5, 1.5)
    assert rows[3]["tokens"] == [0, 1, 2, 3, 4]
    assert {rows[3][name] for name in ("logits", "text", "reward", "calls", "version")} == {None}


def test_a_column_has_one_type_however_many_records_it_has(
    plane: Plane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataplane.client._sync.save.SAVE_BYTES", 1 << 16)
    monkeypatch.setattr(export, "WRITE_BYTES", 1 << 16)
    part = plane.partition("p", free="drop")
    for n in range(8):
        x, y = np.full(4_000 + n, n), n if n % 2 else n / 4
        keys = list(range(4 * n, 4 * n + 4))
        part.put({"x": [x] * 4, "y": [y] * 4}, key=keys)
    part.put({"big": [np.zeros(50_000, np.uint8)] * 4}, key=[*"abcd"], dedup=["big"])
    file = pq.ParquetFile(exported(plane, tmp_path) / "p.parquet")
    assert file.num_row_groups > 8
    table = file.read()
    assert table.schema.field("key").type == pa.string()
    assert table.schema.field("y").type == pa.float64()
    rows = {json.loads(row["key"]): row for row in table.to_pylist()}
    assert len(rows) == 36
    assert all(rows[n]["x"] == [n // 4] * (4_000 + n // 4) for n in range(32))
    assert [rows[4 * n]["y"] for n in range(8)] == [0, 1, 0.5, 3, 1, 5, 1.5, 7]
    assert all(rows[key]["big"] == [0] * 50_000 and rows[key]["x"] is None for key in "abcd")


@pytest.mark.parametrize(("text", "raw"), [("a", b"a"), ([{"a": ["x"]}], [{"a": [b"x"]}])])
def test_texts_do_not_become_bytes_because_other_records_have_bytes(
    plane: Plane,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: object,
    raw: object,
) -> None:
    monkeypatch.setattr("dataplane.client._sync.save.SAVE_BYTES", 1 << 12)
    monkeypatch.setattr(export, "WRITE_BYTES", 1 << 12)
    part = plane.partition("p", free="drop")
    for n, one in enumerate((text, raw)):
        part.put({"x": [one], "fill": [np.zeros(9_000, np.uint8)]}, key=[n], group=n)
    plane.checkpoint(tmp_path / "saved")
    said = refused(capsys, tmp_path / "saved", tmp_path / "out")
    assert "field 'x': the values are" in said and "string" in said and "binary" in said


def test_values_that_no_column_holds_are_named_and_the_other_fields_exported(
    plane: Plane, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part = plane.partition("p", free="drop")
    part.put({"x": [1, "a"], "y": [1, 2]}, key=["a", "b"])
    plane.checkpoint(tmp_path / "saved")
    assert refused(capsys, tmp_path / "saved", tmp_path / "out") == (
        "partition 'p', field 'x': row 1 ('a') does not fit in an Arrow column together with the "
        "rows before it: the column contains both number and str values, but an Arrow column can "
        "have only one type; export the other fields, with --field y"
    )
    assert os.listdir(tmp_path) == ["saved"]
    command = ["checkpoint", "export", f"{tmp_path}/saved", f"{tmp_path}/out", "--field", "y"]
    assert cli.main([*command, "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["partitions"]
    file = tmp_path / "out" / "p.parquet"
    assert told == {"name": "p", "file": file.name, "rows": 2, "bytes": file.stat().st_size}
    assert pq.read_table(file).to_pydict() == {
        "key": ["a", "b"], "group": [None, None], "y": [1, 2]
    }  # fmt: skip


def flip(saved: Path) -> None:
    path = saved / "0000"
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "arguments", "why"),
    [
        (None, ["{0}/none", "{0}/out"], "found no checkpoint in {0}/none: pass a directory that"),
        (None, ["{0}", "{0}/out"], "the checkpoint is damaged ({0}/manifest.json: it is missing)"),
        (
            flip,
            ["{0}/saved", "{0}/out"],
            "the checkpoint is damaged ({0}/saved/0000: it has ",
        ),
        (
            None,
            ["{0}/saved", "{0}/saved"],
            "{0}/saved already exists, and an export never overwrites",
        ),
        (None, ["{0}/saved", "{0}/no/out"], "could not write {0}/no/out: No such file or directo"),
        (None, ["{0}/saved", "{0}/out", "--field", "z"], "no row of {0}/saved has the field 'z': "),
    ],
    ids=["nothing", "no checkpoint", "changed", "existing", "no parent", "no field"],
)
def test_what_cannot_be_exported_is_one_sentence(
    damage: Callable[[Path], None] | None,
    arguments: list[str],
    why: str,
    plane: Plane,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plane.partition("p", free="drop").put({"x": [np.zeros(3_000)]}, key=["a"])
    plane.checkpoint(tmp_path / "saved")
    if damage is not None:
        damage(tmp_path / "saved")
    error = refused(capsys, *(one.format(tmp_path) for one in arguments))
    assert error.startswith(why.format(tmp_path))
    assert os.listdir(tmp_path) == ["saved"]


def test_a_full_disk_is_told_and_nothing_is_left(plane: Plane, tmp_path: Path) -> None:
    plane.partition("p", free="drop").put({"x": np.random.default_rng(0).random((4, 10_000))})
    plane.checkpoint(tmp_path / "saved")
    code = (
        "import resource, signal, sys; from dataplane import cli;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000));"
        "sys.exit(cli.main(['checkpoint', 'export', *sys.argv[1:]]))"
    )
    command = [sys.executable, "-c", code, f"{tmp_path}/saved", f"{tmp_path}/out"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"dataplane: could not write {tmp_path}/out: File too large. The files written so far were "
        "removed; check the disk, or choose another directory\n"
    )
    assert os.listdir(tmp_path) == ["saved"]


def test_keys_and_groups_of_two_types_stay_apart(plane: Plane, tmp_path: Path) -> None:
    part = plane.partition("p", free="drop")
    part.put({"x": [0, 1, 2, 3]}, key=[7, "7", "b", 2**63], group=[1, "1", None, 1])
    rows = pq.read_table(exported(plane, tmp_path) / "p.parquet").to_pylist()
    by_value = sorted(rows, key=lambda row: row["x"])
    assert [json.loads(row["key"]) for row in by_value] == [7, "7", "b", 2**63]
    assert [row["group"] and json.loads(row["group"]) for row in by_value] == [1, "1", None, 1]
