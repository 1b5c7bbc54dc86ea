"""`python -m bench …`: see bench/cli.py."""

from __future__ import annotations

import sys


def main() -> int:
    """Return the exit code: 130 for Ctrl-C even while modules load, 2 if a package is missing."""
    try:
        from bench.cli import main

        return main()
    except ModuleNotFoundError as exc:
        missing = (exc.name or "").partition(".")[0]
        if missing in ("", "bench", "dataplane"):
            raise
        print(
            f"python -m bench: the package {missing!r} is not installed for {sys.executable}: run "
            "`make bench`, or install the extra with `pip install -e '.[bench]'`",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
