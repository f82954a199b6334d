"""What a reader does before it reads: find the channel, and have bulk files imported.

A channel that does not exist is an error, never a result without rows, and no reader creates one.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from qkit._internal.clock import SystemClock
from qkit._internal.logging import logger
from qkit.backend import Admin, Backend, QueueSpec
from qkit.backends.factory import open_backend
from qkit.errors import BackendUnavailable, QueueNotFound
from qkit.native.bulk import published_jobs
from qkit.native.bulk_import import wait_for_import
from qkit.native.log.reader import channels
from qkit.spark.options import Plan
from qkit.spark.sinks import is_bulk, native_path

__all__ = ["check_directory", "exists", "exists_in_log", "import_waiting", "start_for_reading"]


async def start_for_reading(backend: Backend, plan: Plan) -> None:
    """Start a backend of the plan's settings, and have bulk files imported before it is read.

    Raises:
        QueueNotFound: The native directory does not exist; it is not created.
    """
    if is_bulk(plan):
        check_directory(plan)
    await backend.start()
    if is_bulk(plan):
        await _wait_for_import(plan)


async def exists(backend: Backend, plan: Plan) -> bool:
    """Return whether there is something to read, without creating it.

    Returns:
        False if dead letters are asked for and the channel has no dead-letter queue yet.

    Raises:
        QueueNotFound: The channel does not exist. On Redis pub/sub no channel does.
    """
    topics_only = not backend.capabilities.queues
    if topics_only and not plan.dead_letters:
        return True
    if await _is_there(backend, plan.queue, broadcast=plan.broadcast and not plan.dead_letters):
        return True
    channel = plan.settings.broker_name(plan.channel)
    if plan.dead_letters and (
        topics_only or await _is_there(backend, channel, broadcast=plan.broadcast)
    ):
        return False
    raise _not_found(plan, backend.name)


async def _is_there(backend: Backend, queue: str, *, broadcast: bool) -> bool:
    if isinstance(backend, Admin) and not broadcast:
        with suppress(QueueNotFound):
            await backend.stats(queue)
            return True
    try:  # it also finds a list of Redis that another program made
        await backend.declare(QueueSpec(name=queue, broadcast=broadcast, passive=True))
    except QueueNotFound:
        return False
    return True


def _not_found(plan: Plan, backend: str) -> QueueNotFound:
    place = plan.settings.safe_url or str(plan.settings.path)
    return QueueNotFound(
        f"there is no channel {plan.channel!r} in {place}: check the name and the address; a "
        "reader creates no channel",
        backend=backend,
        operation="read",
        queue=plan.channel,
    )


# Native directories


def check_directory(plan: Plan) -> Path:
    """Return the native directory. Raises ``QueueNotFound`` if an engine was never there."""
    path = Path(native_path(plan))
    if not (path / "log").is_dir() and not published_jobs(path):
        raise _not_found(plan, "native")
    return path


def exists_in_log(plan: Plan) -> None:
    """Raise ``QueueNotFound`` unless the log of the native directory tells of the channel.

    For a stream of dead letters the channel is enough: its dead-letter queue may come later.
    """
    known = channels(native_path(plan))
    wanted = {plan.queue, plan.settings.broker_name(plan.channel)}
    if not known & wanted:
        raise _not_found(plan, "native")


async def import_waiting(plan: Plan) -> None:
    """Have the bulk files imported that were committed before this call.

    The owner of the directory imports them; if there is none, this process owns the directory
    meanwhile. Either way they are in the log when this returns.

    Raises:
        BackendUnavailable: They are not imported, although there is an owner.
        LogDamaged: A bulk file that may hold messages of this channel is damaged.
        ConfigError: A bulk file declares this channel in a way that is refused.
    """
    path = check_directory(plan)
    if not published_jobs(path):
        return
    backend = open_backend(plan.settings, SystemClock())
    try:
        await backend.start()
    except BackendUnavailable as error:  # an owner on another machine imports them as well
        logger.warning("%s: %s", plan.channel, error)
    try:
        await _wait_for_import(plan)
    finally:
        await backend.aclose()


async def _wait_for_import(plan: Plan) -> None:
    queues = {plan.queue, plan.settings.broker_name(plan.channel)}
    for error in await wait_for_import(Path(native_path(plan)), queues):
        logger.warning("%s: ignoring a bulk file of another channel: %s", plan.channel, error)
