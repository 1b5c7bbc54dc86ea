"""`python -m bench …`: see bench/cli.py."""

from __future__ import annotations

import sys


def main() -> int:
    """As the command line says; 130 also for Ctrl-C while its modules are still being loaded."""
    try:
        from bench.cli import main

        return main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
