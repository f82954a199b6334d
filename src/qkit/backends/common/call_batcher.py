"""Calls of one turn of the loop, made together in one round trip."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

__all__ = ["Gathered"]

MOST: Final = 1_000


class Gathered:
    """Calls of one turn of the loop, made together; each gets its own answer."""

    def __init__(self, call: Callable[..., Awaitable[list[int]]]) -> None:
        self._call = call
        self._waiting: list[tuple[tuple[str | int, ...], asyncio.Future[int]]] = []
        self._task: asyncio.Task[None] | None = None

    def add(self, *arguments: str | int) -> asyncio.Future[int]:
        """The answer to this call, once the others of this turn have joined it."""
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((arguments, answer))
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="qkit redis settle")
        return answer

    async def _run(self) -> None:
        while self._waiting:
            waiting, self._waiting = self._waiting[:MOST], self._waiting[MOST:]
            try:
                flat = [item for arguments, _ in waiting for item in arguments]
                answers = await self._call(*flat)
                for (_, answer), done in zip(waiting, answers, strict=True):
                    if not answer.done():
                        answer.set_result(done)
            except Exception as error:
                for _, answer in waiting:
                    if not answer.done():
                        answer.set_exception(error)
        self._task = None
