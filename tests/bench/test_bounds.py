"""What nobody's machine could hold is refused at once, with the limit and what it is for."""

from __future__ import annotations

from argparse import ArgumentTypeError

import pytest

from bench import options
from bench.cli import main

RUN = ["run", "--trace", "math"]


@pytest.mark.parametrize(
    ("command", "limit", "why"),
    [
        ([*RUN, "--hosts", "65"], "64", "workers on this machine"),
        ([*RUN, "--prompts", "100000000"], "32,768", "holds all groups"),
        ([*RUN, "--steps", "100000000"], "32,768", "holds the groups"),
        ([*RUN, "--staleness", "100000000"], "64", "holds the batch"),
        ([*RUN, "--prompts", "1000", "--steps", "1000"], "32,768", "1000000 groups"),
        (["memory", "--prompts", "4,100000000"], "32,768", "holds all groups"),
        (["memory", "--least", "2GiB", "--most", "1GiB"], "1073741824", "--least ("),
        (["memory", "--hosts", "100000000"], "64", "workers on this machine"),
        (["sim", "--hosts", "8,100000000"], "16,384", "minutes"),
        (["sim", "--hosts", "4096", "--groups", "1000"], "65,536", "the model holds them all"),
        (["trace", "math", "-o", "/dev/null", "--steps", "1000000000"], "8,388,608", "no bits"),
        (["perf", "--rounds", "100000000"], "1,000", "kept until the end"),
        (["compare", "--sizes", "1000000GiB"], "", "several copies"),
        (["compare", "--rows", "100000000"], "65,536", "a separate array"),
        (["faults", "--frames", "1000000000"], "100,000,000", "thousand a second"),
    ],
)
def test_absurd_sizes_are_refused(
    command: list[str], limit: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(command)
    except SystemExit as refused:  # by argparse
        code = int(refused.code or 0)
    assert code == 2
    said = " ".join(capsys.readouterr().err.split())
    assert limit in said and why in said


def test_numbers_too_long_for_any_field_are_refused() -> None:
    assert options.count("9" * 18) == 10**18 - 1
    for parse, text in ((options.count, "9" * 5_000), (options.size, "9" * 5_000 + "GiB")):
        with pytest.raises(ArgumentTypeError, match="more than|over the limit"):
            parse(text)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1e-300", "1e300", "fast"])
def test_a_positive_number_is_one_that_clocks_can_count_with(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="number"):
        options.positive(text)
