"""What a scenario of the conformance suite reports when it fails."""

from __future__ import annotations

import pytest

from qkit.conformance.harness import case


def test_a_failed_assertion_names_its_case() -> None:
    with pytest.raises(AssertionError) as caught, case("empty"):
        raise AssertionError("refused")
    assert "in the case 'empty'" in caught.exconly()


def test_an_error_that_was_not_raised_names_its_case() -> None:
    with pytest.raises(pytest.fail.Exception) as caught, case("empty"), pytest.raises(ValueError):
        pass
    assert "in the case 'empty'" in caught.exconly()
