"""Types that executors import by name."""

from __future__ import annotations

from pydantic import BaseModel, Field


class Order(BaseModel):
    id: int
    total: float = Field(ge=0)
