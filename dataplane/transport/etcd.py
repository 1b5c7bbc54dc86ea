"""The calls to etcd that a roster needs, over the JSON gateway of etcd's v3 API.

Values and keys travel in base64 and numbers as text, as the gateway requires. A call asks one
endpoint after the other, and each for at most `CALL_S`.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dataplane.errors import InvalidConfig, Unavailable

CALL_S = 1.0
OK, NOT_FOUND = 200, 404


@dataclass(frozen=True, slots=True)
class EtcdValue:
    """A value in etcd, and the revision at which it was stored."""

    value: bytes
    changed: int
    lease: int = 0
    """the lease under which it was stored, or 0"""


class Etcd:
    """A client of one etcd cluster. endpoints: `host:port` of each server."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        try:
            import aiohttp
        except ImportError as exc:
            raise InvalidConfig(
                "--roster etcd://… needs the aiohttp package: install it with pip install "
                "'dataplane-rl[etcd]'"
            ) from exc
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CALL_S))
        self._failures = (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError)
        self._endpoints = list(endpoints)

    async def close(self) -> None:
        await self._http.close()

    async def get(self, key: str) -> EtcdValue | None:
        """Return a value, or None. All calls here raise Unavailable if no server answers."""
        found = (await self._ask("kv/range", {"key": _b64(key)})).get("kvs", [])
        if not found:
            return None
        one = found[0]
        value = base64.b64decode(one.get("value", ""))
        return EtcdValue(value, int(one["mod_revision"]), int(one.get("lease", 0)))

    async def put_if(
        self, key: str, value: bytes, created: dict[str, int], changed: dict[str, int], lease: int
    ) -> int:
        """Store a value, with a lease or none (0), if the keys were created and changed at these
        revisions (0: the key does not exist). Return the new revision, or 0 if the condition
        failed."""
        compare = [
            {"target": target, "key": _b64(name), field: str(revision), "result": "EQUAL"}
            for target, field, wanted in (
                ("CREATE", "create_revision", created),
                ("MOD", "mod_revision", changed),
            )
            for name, revision in wanted.items()
        ]
        put = {"key": _b64(key), "value": base64.b64encode(value).decode(), "lease": str(lease)}
        answer = await self._ask("kv/txn", {"compare": compare, "success": [{"request_put": put}]})
        return int(answer["header"]["revision"]) if answer.get("succeeded") else 0

    async def grant(self, ttl_s: int) -> int:
        """Grant a lease. Keys stored with it are deleted when it expires."""
        return int((await self._ask("lease/grant", {"TTL": str(ttl_s)}))["ID"])

    async def keep_alive(self, lease: int) -> bool:
        """Renew a lease. Return False if it has expired."""
        answer = await self._ask("lease/keepalive", {"ID": str(lease)})
        return int(answer.get("result", {}).get("TTL", 0)) > 0

    async def revoke(self, lease: int) -> None:
        """End a lease, and delete the keys stored with it. A no-op if it has expired."""
        await self._ask("lease/revoke", {"ID": str(lease)}, or_status=NOT_FOUND)

    async def _ask(self, call: str, body: dict[str, Any], or_status: int = OK) -> dict[str, Any]:
        for endpoint in list(self._endpoints):
            try:
                async with self._http.post(f"http://{endpoint}/v3/{call}", json=body) as reply:
                    answer = await reply.json(content_type=None)
                    if reply.status in (OK, or_status) and isinstance(answer, dict):
                        return answer
                    failure = f"{reply.status}: {answer}"
            except self._failures as exc:
                failure = f"{type(exc).__name__}: {exc}"
            # The endpoint that answered last is tried first.
            self._endpoints.remove(endpoint)
            self._endpoints.append(endpoint)
        raise Unavailable(
            f"etcd at {', '.join(sorted(self._endpoints))} is not responding: {failure}. "
            "The run continues, but no peer can join, leave or be replaced until etcd responds. "
            "Check that etcd is running"
        )


def _b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
