"""Parameters of the tasks, from "RL in the Wild" (arXiv 2509.25279) and its PolyTrace suite.

Marks: S stated there (or by the source named), M measured on published trace files, A assumed.
Turns, media and rewards that a task does not name are the defaults of `Task`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bench.traces.distributions import Distribution, Gamma, Lognormal, Normal, Quantiles, Tokens

TOKEN_SECONDS = 0.025  # A: one token of one sequence in a full batch


@dataclass(frozen=True, slots=True)
class Cluster:
    """Videos of one size: their share of the prompts, and the prompt's tokens that go with it."""

    share: float
    prompt_tokens: int
    grid: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Images:
    """`counts`: probabilities of 1, 2, … images in a prompt; `visual_tokens`: of each."""

    counts: tuple[float, ...]
    visual_tokens: Tokens


@dataclass(frozen=True, slots=True)
class Tail:
    """From a step on, a share of the responses comes from another distribution."""

    from_step: int
    share: float
    tokens: Distribution


@dataclass(frozen=True, slots=True)
class Tools:
    """Multi-turn sessions: `turns` has the probabilities of 1, 2, … turns.

    Without `last_turn` the task's response is a session's total, which its turns share at random;
    with it, the response is that of a turn that calls a tool.
    """

    turns: tuple[float, ...]
    text: Tokens
    seconds: Distribution
    last_turn: Tokens | None = None
    session_cap: int = 32_000


@dataclass(frozen=True, slots=True)
class Task:
    """A task's distributions. `between`: the prompts' share of the log-length variance.

    prompts, samples: groups of a step and rows of a group. survive: the share of groups that
    dynamic sampling keeps; None where nothing is dropped. reward_seconds: lowest and highest mean
    of a block of 64 rows, for one row.
    """

    name: str
    number: int
    prompts: int
    samples: int
    prompt: Tokens
    response: Tokens
    between: float = 0.30
    tails: tuple[Tail, ...] = ()
    tools: Tools | None = None
    videos: tuple[Cluster, ...] = ()
    images: Images | None = None
    survive: float | None = None
    reward_seconds: tuple[float, float] = (0.002, 0.002)  # A: a rule looks at the answer

    @property
    def media(self) -> bool:
        return bool(self.videos or self.images)


# The pixel rows (1,920 … 16,560) are the suite's (M); the grids are chosen to match them.
_VIDEOS = (
    Cluster(0.011, 550, (2, 30, 32)),
    Cluster(0.294, 1_063, (4, 30, 32)),
    Cluster(0.011, 2_500, (7, 36, 46)),
    Cluster(0.336, 3_830, (9, 36, 46)),
    Cluster(0.348, 4_245, (10, 36, 46)),
)
# Three quantiles are measured (ServeGen); the lowest is where the mean is 12.9 MB an image.
_VISUAL_TOKENS = Quantiles(((0, 22), (0.5, 690), (0.9, 1_222), (1, 1_280)))
# "More than four: .04", spread evenly over five to nine.
_IMAGE_COUNTS = (0.80, 0.07, 0.07, 0.02, *(0.04 / 5,) * 5)
_SEARCH_SECONDS = Quantiles(
    ((0, 0.05), (0.5, 0.161), (0.9, 1.13), (0.99, 2.69), (1, 3.8)),
    logarithmic=True,  # M, but for the lowest (A)
)
_MATH_PROMPT = Tokens(Lognormal(80.1, 0.532, shift=48.4), cap=32_000)

_ALL = (
    Task(
        "image",
        number=3,
        prompts=512,
        samples=8,
        prompt=Tokens(Lognormal.of(106, p90=2_000), cap=32_000),  # text; visual tokens come on top
        response=Tokens(Lognormal(2_000, 0.9), cap=16_384),
        images=Images(_IMAGE_COUNTS, Tokens(_VISUAL_TOKENS, cap=1_280)),
    ),
    Task(
        "math",
        number=2,
        prompts=256,
        samples=16,
        prompt=_MATH_PROMPT,
        response=Tokens(Gamma(2.438, 3_847, shift=195), cap=32_000),
    ),
    Task(
        "tool_use",
        number=4,
        prompts=256,
        samples=16,
        prompt=Tokens(Normal(250, 30), cap=32_000),
        response=Tokens(Lognormal(767, 0.822, shift=4.9), cap=32_000),
        tools=Tools(
            turns=(0.019, 0.078, 0.432, 0.073, 0.203, 0.143, 0.038, 0.008, 0.003, 0.004),
            text=Tokens(Normal(470, 60), cap=32_000),
            seconds=Lognormal.of(0.16, p99=2.7),
        ),
    ),
    Task(
        "video",
        number=1,
        prompts=64,
        samples=8,
        prompt=Tokens(Normal(1, 0), cap=1),  # its cluster says it
        response=Tokens(Lognormal(math.exp(5.06), 0.35), cap=16_000),
        between=0.11,
        tails=(
            Tail(0, 0.0003, Normal(16_000, 0)),  # they never stop by themselves
            # From step 21 on p99 is 2,400 (M): the median of 2 % of the responses. Its spread is A.
            Tail(21, 0.02, Lognormal(2_400, 0.6)),
        ),
        videos=_VIDEOS,
    ),
    Task(
        "math_open",
        number=5,
        prompts=96,
        samples=8,
        prompt=Tokens(Lognormal(math.exp(5.04), 0.29), cap=617),
        response=Tokens(Lognormal(math.exp(6.04), 0.93), cap=32_768),
        between=0.08,
        survive=0.315,  # S: 28 to 35 %
    ),
    Task(
        "programming",
        number=6,
        prompts=16,
        samples=8,
        prompt=Tokens(Lognormal(math.exp(6.02), 0.59), cap=1_777),
        response=Tokens(Lognormal(math.exp(8.90), math.hypot(0.77, 0.22)), cap=16_000),
        between=0.77**2 / (0.77**2 + 0.22**2),  # .92; M: .93
        reward_seconds=(37 / 64, 125 / 64),
    ),
    Task(
        "search",
        number=7,
        prompts=256,
        samples=8,
        prompt=Tokens(Normal(318, 2), cap=3_000),
        response=Tokens(Lognormal.of(34, p99=453), cap=3_000),
        tools=Tools(
            turns=(0.072, 0.430, 0.342, 0.106, 0.049),
            text=Tokens(Lognormal.of(521, p99=1_467), cap=3_000),
            seconds=_SEARCH_SECONDS,
            last_turn=Tokens(Lognormal.of(83, p99=318), cap=3_000),
            session_cap=3_000,
        ),
    ),
    Task(
        "image_open",
        number=8,
        prompts=512,
        samples=5,
        # Text (A); with the image 4,096 tokens at most.
        prompt=Tokens(Lognormal(60, 0.5), cap=4_096 - 800),
        response=Tokens(Lognormal(200, 0.5), cap=2_048),
        images=Images((1.0,), Tokens(Quantiles(((0, 256), (1, 800))), cap=800)),
    ),
    Task(
        "straggler",
        number=9,
        prompts=64,
        samples=8,
        prompt=_MATH_PROMPT,
        # S (Laminar): 10 × the median.
        response=Tokens(Lognormal.of(1_000, p99=10_000), cap=32_000),
    ),
)
TASKS = {task.name: task for task in _ALL}
