"""Load the classes that other packages publish under an entry point group.

Nothing is imported before `load`: an engine may take long, and only some processes need it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dataplane.errors import DataplaneError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint, EntryPoints


def installed(group: str) -> EntryPoints:
    """Return the entry points of a group."""
    from importlib.metadata import entry_points  # 15 ms, and few processes have plug-ins

    return entry_points(group=group)


def entry(group: str, name: str, value: str) -> EntryPoint:
    """Return an entry point of our own, which no package has to publish."""
    from importlib.metadata import EntryPoint

    return EntryPoint(name, value, group)


def own(value: str) -> Any:
    """Import a module, or `module:name`, when it is needed. The value is written in our source, and
    never comes from outside."""
    return entry("dataplane", value, value).load()


def load(
    entry: EntryPoint, base: type[Any], what: str, missing: type[DataplaneError], **details: Any
) -> type[Any]:
    """Return the class of an entry point. If it cannot be imported, or is not a subclass of `base`,
    raise `missing` with these details. `what`: how the message names the plug-in."""
    try:
        found = entry.load()
    except Exception as exc:  # other people's code runs, and may raise anything
        raise missing(
            f"cannot load {what} ({entry.value}): {type(exc).__name__}: {exc}. Reinstall "
            "the package that provides it",
            **details,
        ) from exc
    if not (isinstance(found, type) and issubclass(found, base)):
        raise missing(
            f"cannot load {what}, because {entry.value} is not a subclass of "
            f"{base.__name__}: correct the entry point of the package that provides it",
            **details,
        )
    return found
