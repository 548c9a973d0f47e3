"""Published models for tests/real, each opened by one process, and the table at their end."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property

import pytest

from rooflax import LLM
from tests.real.fetch import GEMMA, SMOLLM2, Published


class Real:
    """A published model, opened when it is first asked for.

    Attributes:
        name: in the table.
        llm: in the file's own formats.
        exact: with the file's weights in float32.
    """

    def __init__(self, published: Published):
        self.published, self.path = published, published.path
        self.name = published.path.stem

    @cached_property
    def llm(self) -> LLM:
        return LLM(self.path)

    @cached_property
    def exact(self) -> LLM:
        return LLM(self.path, dtype="float32")


@cache
def opened(published: Published) -> Real:
    assert published.path.exists(), f"{published.path} is missing; run `make real`"
    return Real(published)


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(model, id=name, marks=pytest.mark.xdist_group(name))
        for name, model in (("smollm2", SMOLLM2), ("gemma", GEMMA))
    ],
)
def real(request: pytest.FixtureRequest) -> Real:
    return opened(request.param)


@pytest.fixture(scope="session")
def smollm2() -> Real:
    return opened(SMOLLM2)


@pytest.fixture
def note(record_property) -> Callable[[Real, str, str], None]:
    """Adds a row to the table that ends the run: a model, what was asked, what came."""
    return lambda real, what, found: record_property("row", (real.name, what, found))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for some in terminalreporter.stats.values() for report in some]
    reports = [report for report in reports if getattr(report, "when", None) == "call"]
    rows = [row for report in reports for _, row in report.user_properties]
    for name, what, found in sorted(rows, key=lambda row: row[0]):
        terminalreporter.write_line(f"{name:<30} {what:<34} {found}")
