"""Hook that marks the conformance scenarios with the requirements that they prove."""

from __future__ import annotations

import pytest

from tests.conformance.proofs import PROOFS


def pytest_itemcollected(item: pytest.Item) -> None:
    if isinstance(item, pytest.Function) and item.originalname in PROOFS:
        item.add_marker(pytest.mark.proves(*PROOFS[item.originalname]))
