"""The pytest plugin fails a test that does not await one of qkit's coroutines."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.slow

FORGETFUL = """
import asyncio
import pytest
from qkit import QueueService, Settings, consume
from qkit.testing import TestService

def make(*handlers):
    service = QueueService(Settings(type="native"))
    for handler in handlers:
        service.register(handler)
    return service

def test_forgets_in_the_test():
    async def main():
        async with make() as service:
            service.send("orders", 1)
    asyncio.run(main())

def test_forgets_in_a_handler():
    @consume("orders")
    async def place(number: int) -> None:
        service.send("invoices", number)

    service = make(place)

    async def main():
        async with TestService(service) as t:
            await t.send("orders", 1)
            await t.drain()
    asyncio.run(main())

def test_forgets_a_local_variable():
    async def main():
        async with make() as service:
            later = service.stats("orders")
    asyncio.run(main())

@pytest.fixture
def forgetful():
    async def main():
        async with make() as service:
            service.publish("prices", 1)
    asyncio.run(main())

def test_with_a_fixture_that_forgets(forgetful):
    pass

def test_awaits():
    async def main():
        async with make() as service:
            await service.send("orders", 1)
    asyncio.run(main())

async def other():
    pass

def test_forgets_its_own_coroutine():
    other()
"""


@pytest.fixture(autouse=True)
def _configure_pytest_asyncio(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function\n")


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("-W", "ignore"),
        ("-W", "error"),
        ("-p", "no:warnings", "-p", "no:unraisableexception"),
        ("-p", "no:asyncio", "-W", "ignore::RuntimeWarning"),
    ],
    ids=" ".join,
)
def test_a_test_that_forgets_await_fails_with_any_warning_filter(
    pytester: pytest.Pytester, options: tuple[str, ...]
) -> None:
    pytester.makepyfile(FORGETFUL)
    result = pytester.runpytest_subprocess("-q", "-rfE", *options)
    outcomes = result.parseoutcomes()
    strict = "error" in options  # pytest itself then also fails test_forgets_its_own_coroutine
    assert (outcomes["failed"], outcomes["errors"]) == (4 if strict else 3, 1)
    assert outcomes["passed"] == (1 if strict else 2)
    if not strict:
        result.stdout.fnmatch_lines(
            [
                "never awaited: QueueService.send. The call did nothing: write `await` before it",
                "never awaited: QueueService.stats. *",
            ]
        )
    result.stdout.fnmatch_lines_random(
        [
            "FAILED *::test_forgets_in_the_test*",
            "FAILED *::test_forgets_in_a_handler*",
            "FAILED *::test_forgets_a_local_variable*",
            "ERROR *::test_with_a_fixture_that_forgets*",
        ]
    )


def test_the_warning_still_names_the_line_that_dropped_the_coroutine(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(
        test_own="""
        import asyncio

        async def other():
            pass

        def test_own():
            other()
        """
    )
    result = pytester.runpytest_subprocess("-q")
    result.assert_outcomes(passed=1, warnings=1)
    result.stdout.fnmatch_lines(
        ["*test_own.py:7: RuntimeWarning: coroutine 'other' was never awaited*"]
    )


def test_in_debug_mode_the_warning_still_names_where_the_coroutine_was_created(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(
        """
        import asyncio

        async def other():
            pass

        async def main():
            other()

        def test_own():
            asyncio.run(main(), debug=True)
        """
    )
    result = pytester.runpytest_subprocess("-q")
    result.assert_outcomes(passed=1, warnings=1)
    result.stdout.fnmatch_lines(["*Coroutine created at (most recent call last)*", "*    other()"])


def test_a_run_restores_the_unawaited_coroutine_hook(pytester: pytest.Pytester) -> None:
    import warnings

    before = warnings._warn_unawaited_coroutine  # type: ignore[attr-defined]
    pytester.makepyfile("def test_nothing(): pass")
    pytester.runpytest_inprocess("-q").assert_outcomes(passed=1)
    assert warnings._warn_unawaited_coroutine is before  # type: ignore[attr-defined]
