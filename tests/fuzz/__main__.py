"""`python -m tests.fuzz TARGET SECONDS [FOLDER]`: coverage-guided fuzzing of one decoder (atheris).

FOLDER keeps the inputs that were worth something, and those that broke the decoder, for the next
time. A found bug ends it with a trace and a file that `python -m tests.fuzz TARGET FILE` repeats.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["dataplane", "bench"]):
    from tests.fuzz.targets import TARGETS

MAX_BYTES = 1 << 16


def main(name: str, what: str, folder: str = ".fuzz") -> None:
    if Path(what).is_file():
        TARGETS[name].run(Path(what).read_bytes())
        return
    corpus = Path(folder) / name
    corpus.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(TARGETS[name].seeds()):
        (corpus / f"seed-{number}").write_bytes(data)
    limits = [f"-max_total_time={int(what)}", f"-max_len={MAX_BYTES}", "-timeout=10"]
    limits += ["-rss_limit_mb=2048", f"-artifact_prefix={corpus}/broke-", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *limits, str(corpus)], TARGETS[name].run)
    atheris.Fuzz()


if __name__ == "__main__":
    if not 3 <= len(sys.argv) <= 4 or sys.argv[1] not in TARGETS:
        sys.exit(f"{__doc__}\nTARGET: {', '.join(TARGETS)}")
    main(*sys.argv[1:])
