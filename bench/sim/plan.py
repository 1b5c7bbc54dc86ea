"""What a job is made of, worked out once for all simulated runs of it."""

from __future__ import annotations

from collections import defaultdict

from bench.planes.base import Job
from bench.schedule import Piece, schedule
from bench.sim.costs import Work, added, read, written
from bench.traces import Prompt


class Plan:
    """The groups of each step, what each host has to put and when, and how large things are."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._steps: list[list[Prompt]] = [[] for _ in range(job.steps)]
        for prompt in job.generate():
            self._steps[prompt.step].append(prompt)
        self._pieces: dict[tuple[int, int], list[Piece]] = defaultdict(list)
        for piece in schedule(job, job.generate(), takes_pieces=True):
            prompt = piece.prompt
            self._pieces[prompt.step, prompt.index % job.hosts].append(piece)
        self._work: dict[tuple[str, int], Work] = {}

    def pieces(self, step: int, host: int) -> list[Piece]:
        """In order of time."""
        return self._pieces[step, host]

    def work_of(self, kind: str, prompt: Prompt) -> Work:
        """What is `written` of a group, or read by a stage, or added by one (`added reward`)."""
        at = (kind, prompt.index)
        if at not in self._work:
            if kind == "written":
                self._work[at] = written(self.job, prompt)
            elif kind.startswith("added "):
                self._work[at] = added(self.job, kind.removeprefix("added "), prompt)
            else:
                self._work[at] = read(self.job, kind, prompt)
        return self._work[at]

    def stage_of(self, stage: str, step: int) -> list[Prompt]:
        """The groups of a step that a stage gets to see."""
        everybody = stage == "reward" or self.job.task.survive is None
        seen = ("trained", "filtered") if everybody else ("trained",)
        return [prompt for prompt in self._steps[step] if self.job.fate(prompt) in seen]
