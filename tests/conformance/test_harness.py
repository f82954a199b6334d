"""Tests of the conformance harness."""

from __future__ import annotations

import pytest

from qkit.conformance.harness import case


def test_a_failed_assertion_names_its_case() -> None:
    with pytest.raises(AssertionError) as caught, case("empty"):
        raise AssertionError("failed")
    assert "in the case 'empty'" in caught.exconly()


def test_the_failure_for_an_error_that_was_not_raised_names_its_case() -> None:
    with pytest.raises(pytest.fail.Exception) as caught, case("empty"), pytest.raises(ValueError):
        pass
    assert "in the case 'empty'" in caught.exconly()
