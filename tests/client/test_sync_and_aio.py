"""The two clients are one: what blocks is made of what is awaited."""

from __future__ import annotations

import inspect

import pytest

import dataplane
from dataplane import aio
from tests.client.make_sync import CLIENT, made_of, modules

ASYNC_NAMES = {"aclose": "close", "__aenter__": "__enter__", "__aexit__": "__exit__"}
ASYNC_NAMES |= {"__aiter__": "__iter__"}


@pytest.mark.parametrize("name", modules())
def test_the_blocking_client_is_as_the_awaiting_one_makes_it(name: str) -> None:
    assert (CLIENT / "_sync" / name).read_text() == made_of(name), "run make sync"


@pytest.mark.parametrize("name", aio.__all__)
def test_both_have_each_method_with_its_signature_and_what_it_does(name: str) -> None:
    blocking, awaiting = getattr(dataplane, name), getattr(aio, name)
    if inspect.isfunction(awaiting):
        assert inspect.signature(blocking).parameters == inspect.signature(awaiting).parameters
        assert blocking.__doc__ and awaiting.__doc__
        return
    mine = {ASYNC_NAMES.get(n, n): m for n, m in inspect.getmembers(awaiting, callable)}
    for method, member in inspect.getmembers(blocking, inspect.isfunction):
        if method.startswith("_") and method not in ASYNC_NAMES.values():
            continue
        assert inspect.signature(member).parameters == inspect.signature(mine[method]).parameters
        assert member.__doc__ or method.startswith("__"), f"{name}.{method}"
        assert bool(member.__doc__) == bool(mine[method].__doc__)
