"""`python -m dataplane` is the command line."""

from dataplane.cli import main

raise SystemExit(main())
