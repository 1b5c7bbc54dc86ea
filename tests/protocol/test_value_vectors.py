"""Objects, keys, tokens and tickets against the committed bytes and another reading of them."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
import torch
import xxhash

from dataplane.client.read.chunk_columns import ChunkForm
from dataplane.launch.token import Token
from dataplane.metadata.roster.roster import Roster
from dataplane.metadata.tables.keys import format_minted, hash_name, mint_many
from dataplane.transport import tickets
from dataplane.transport.bulk_frames import Get
from dataplane.wire import layouts, objects
from dataplane.wire.arrays import dtype_of
from dataplane.wire.tables import Owner
from tests.protocol.make_vectors import Vector, load, python_of

OBJECTS, CHUNKS, NAMES, TICKETS, TOKENS, ROSTERS = map(
    load, ("objects", "chunks", "names", "tickets", "tokens", "rosters")
)
CONTEXT = b"dataplane bulk ticket 1"


def value_of(value: Any) -> Any:
    """The Python value that an object vector stands for."""
    if isinstance(value, list):
        return [value_of(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"bin": digits}:
            return bytes.fromhex(digits)
        case {"tuple": items}:
            return tuple(map(value_of, items))
        case {"int": digits}:
            return int(digits)
        case {"scalar": [dtype, digits]}:
            return np.frombuffer(bytes.fromhex(digits), dtype_of(dtype))[0]
        case {"array": [dtype, shape, digits]}:
            return np.frombuffer(bytes.fromhex(digits), dtype_of(dtype)).reshape(shape)
        case {"tensor": [dtype, shape, digits]}:
            items = np.frombuffer(bytes.fromhex(digits), dtype_of(dtype)).copy()
            return torch.from_numpy(items.reshape(shape))
        case {"map": pairs}:
            return {value_of(key): value_of(item) for key, item in pairs}
    raise AssertionError(value)


def same(a: Any, b: Any) -> bool:
    """Equal, with equal types all the way down, and the same arrays."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a), list(b)) and same(list(a.values()), list(b.values()))
    if isinstance(a, torch.Tensor):
        return bool(a.dtype == b.dtype and torch.equal(a, b))
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    return repr(a) == repr(b)


each_object = pytest.mark.parametrize("vector", OBJECTS, ids=[v["name"] for v in OBJECTS])


@each_object
def test_an_independent_decoder_reads_an_objects_literal(vector: Vector) -> None:
    literal, row = python_of(vector["literal"]), bytes.fromhex(vector["hex"])
    head = row[4 : 4 + int.from_bytes(row[:4], "little")]
    assert repr(msgpack.unpackb(head, strict_map_key=False)) == repr(literal)


@each_object
def test_an_object_is_read_with_its_exact_types(vector: Vector) -> None:
    decoded = objects.decode(bytes.fromhex(vector["hex"]))
    assert same(decoded, value_of(vector["value"]))


@each_object
def test_an_object_is_written_as_exactly_these_bytes(vector: Vector) -> None:
    buffers = objects.encode(value_of(vector["value"]))
    assert b"".join(map(bytes, buffers)).hex() == vector["hex"]


each_chunk = pytest.mark.parametrize("vector", CHUNKS, ids=[v["name"] for v in CHUNKS])


@each_chunk
def test_a_layout_is_read_and_written_as_these_bytes(vector: Vector) -> None:
    specs = layouts.decode(bytes.fromhex(vector["layout"]))
    told = [{"dtype": "", "shape": [], "loose": False} | column for column in vector["columns"]]
    assert [msgspec.structs.asdict(one) | {"shape": list(one.shape)} for one in specs] == told
    assert layouts.encode(specs).hex() == vector["layout"]


@each_chunk
def test_the_rows_of_a_chunk_are_read(vector: Vector) -> None:
    memory, lengths = (bytes.fromhex(vector.get(name, "")) for name in ("hex", "lengths"))
    specs = layouts.decode(bytes.fromhex(vector["layout"]))
    rows = len(vector["rows"][0])
    columns = ChunkForm(specs, rows).columns(memory, lengths if "lengths" in vector else None)
    for column, expected in zip(columns, vector["rows"], strict=True):
        if column.is_array:
            found = list(column.arrays(0, rows))
            wanted = [value_of({"array": [column.spec.dtype, *row]}) for row in expected]
            assert same(found, wanted)
            continue
        if column.spec.dtype:
            items = [value_of({"scalar": [column.spec.dtype, row]}) for row in expected]
            wanted = items if column.spec.kind == "scalar" else [item.item() for item in items]
            assert same(list(column.scalars(0, rows)), wanted)
            continue
        cells = list(map(bytes, column.cells(0, rows)))
        if column.spec.kind == "object":
            assert same([objects.decode(cell) for cell in cells], list(map(value_of, expected)))
        else:
            assert cells == [
                row.encode() if isinstance(row, str) else value_of(row) for row in expected
            ]


@pytest.mark.parametrize("vector", NAMES, ids=[repr(v["name"]) for v in NAMES])
def test_a_name_has_its_key(vector: Vector) -> None:
    key = hash_name(vector["name"])
    assert key.hex() == vector["key"]
    if "minted" in vector:
        assert mint_many(vector["minted"]["session"], vector["minted"]["counter"], 1) == key
        assert format_minted(key) == vector["name"]


def _pack(*parts: Any) -> bytes:
    packed: bytes = msgpack.packb(list(parts), use_bin_type=True)
    return packed


@pytest.mark.parametrize("vector", TOKENS, ids=[v["name"] for v in TOKENS])
def test_the_keys_of_a_token_follow_from_the_page(vector: Vector) -> None:
    secret = bytes.fromhex(vector["token"])
    token = Token(Path("F"), secret)
    for role, key in vector["keys"].items():
        signed = _pack(b"dataplane token 1", vector["plane"], role)
        assert hmac.digest(secret, signed, "sha256").hex() == key
        assert token.key(vector["plane"], role).hex() == key
    by_role = {role: bytes.fromhex(key) for role, key in vector["keys"].items()}
    named = _pack(CONTEXT, vector["plane"], vector["epoch"])
    assert hmac.digest(by_role["bulk"], named, "sha256").hex() == vector["plane_key"]
    key = tickets.plane_key(vector["plane"], tuple(vector["epoch"]), by_role["bulk"])
    assert key.hex() == vector["plane_key"]


@pytest.mark.parametrize("vector", TICKETS, ids=[v["name"] for v in TICKETS])
def test_a_ticket_follows_from_the_page(vector: Vector) -> None:
    key = hashlib.sha256(_pack(CONTEXT, vector["plane"], vector["epoch"])).digest()
    nonce = bytes.fromhex(vector["challenge"]) + vector["sequence"].to_bytes(8, "little")
    pieces, card = bytes.fromhex(vector["pieces"]), bytes.fromhex(vector["card"])
    told = (*vector["owner"], vector["expiry_ms"], pieces, vector["transport"], card)
    assert key.hex() == vector["plane_key"]
    ticket = hmac.digest(key, _pack(CONTEXT, nonce, *told), "sha256")
    assert ticket.hex() == vector["ticket"]


@pytest.mark.parametrize("vector", TICKETS, ids=[v["name"] for v in TICKETS])
def test_the_proofs_of_a_connection_follow_from_the_page(vector: Vector) -> None:
    key = bytes.fromhex(vector["plane_key"])
    challenges = [bytes.fromhex(vector[name]) for name in ("challenge", "readers_challenge")]
    for role, told in vector["proofs"].items():
        signed = _pack(b"dataplane bulk join 1", role, *challenges)
        assert hmac.digest(key, signed, "sha256").hex() == told
        assert tickets.proof(key, role, *challenges).hex() == told


@pytest.mark.parametrize("vector", TICKETS, ids=[v["name"] for v in TICKETS])
def test_a_ticket_is_issued_as_in_its_vector_and_signs_all_of_a_request(vector: Vector) -> None:
    key = tickets.plane_key(vector["plane"], tuple(vector["epoch"]))
    nonce = tickets.nonce_of(bytes.fromhex(vector["challenge"]), vector["sequence"])
    pieces, card = bytes.fromhex(vector["pieces"]), bytes.fromhex(vector["card"])
    owner, way = Owner(*vector["owner"]), (vector["transport"], card)
    get = Get(owner, vector["expiry_ms"], pieces, *way)
    issued = tickets.ticket_of(key, nonce, get)
    assert issued.hex() == vector["ticket"]
    changes: list[dict[str, Any]] = [
        {"owner": Owner(owner.peer, owner.incarnation + 1)},
        {"expiry_ms": get.expiry_ms + 1},
        {"pieces": pieces + b"\0"},
        {"transport": "other"},
        {"card": card + b"\0"},
    ]
    for changed in changes:
        assert tickets.ticket_of(key, nonce, msgspec.structs.replace(get, **changed)) != issued
    assert tickets.ticket_of(key, nonce[::-1], get) != issued


def hashed(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode())


def mixed(x: int) -> int:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> shift)) * factor % 2**64
    return x ^ (x >> 31)


def first_roster(seeds: list[str], shards: int) -> dict[str, Any]:
    """What the page says, shard by shard and without numpy."""
    members = [s.strip().rstrip("/").lower() for s in seeds]
    members = [m.replace("://localhost:", "://127.0.0.1:") for m in members]
    hosts = range(1 if len(members) >= 3 else 0, len(members))
    weight = [[mixed(mixed(s + 1) ^ hashed(m)) for m in members] for s in range(shards)]
    primaries = [max(hosts, key=row.__getitem__) for row in weight]
    ring = sorted(hosts, key=lambda host: hashed(members[host]))
    after = dict(zip(ring, ring[1:] + ring[:1], strict=True))
    return {
        "members": members,
        "epoch": [hashed("\n".join(members)) % 2**53, 1],
        "primaries": primaries,
        "backups": [0xFFFF if len(ring) == 1 else after[host] for host in primaries],
    }


@pytest.mark.parametrize("vector", ROSTERS, ids=[v["name"] for v in ROSTERS])
def test_the_first_roster_follows_from_the_page(vector: Vector) -> None:
    told = first_roster(vector["seeds"], vector["shards"])
    assert told == {name: vector[name] for name in told}
    assert vector["bucket"] == hashed(vector["partition"]) % vector["shards"]


@pytest.mark.parametrize("vector", ROSTERS, ids=[v["name"] for v in ROSTERS])
def test_a_peer_computes_the_roster_of_its_vector(vector: Vector) -> None:
    roster = Roster.from_seeds(vector["seeds"], vector["shards"])
    assert list(roster.members) == vector["members"]
    assert list(roster.epoch) == vector["epoch"]
    assert roster.primaries.tolist() == vector["primaries"]
    assert roster.backups.tolist() == vector["backups"]
    assert not roster.in_sync.any() and not any(roster.incarnations)
    partition = vector["partition"]
    assert roster.bucket(partition) == vector["bucket"]
    assert roster.home(partition) == roster.address(vector["bucket"])
