"""Readable descriptions of pydantic validation errors."""

from __future__ import annotations

from typing import Final

from pydantic import ValidationError

__all__ = ["describe_errors"]

MAX_PROBLEMS: Final = 5
MAX_NAME_LENGTH: Final = 80


def describe_errors(error: ValidationError, whole: str) -> str:
    """Describe the first ``MAX_PROBLEMS`` validation errors in one line, without input values.

    Args:
        error: Validation error of a model.
        whole: Name of the whole input, for a problem that does not concern a single field.

    >>> from pydantic import BaseModel
    >>> class Order(BaseModel):
    ...     number: int
    >>> try:
    ...     Order.model_validate({})
    ... except ValidationError as error:
    ...     print(describe_errors(error, "the order"))
    number: Field required
    """
    problems: list[str] = []
    for item in error.errors(include_url=False, include_input=False)[:MAX_PROBLEMS]:
        field = ".".join(map(str, item["loc"]))[:MAX_NAME_LENGTH]
        problems.append(f"{field or whole}: {item['msg']}")
    return "; ".join(problems)
