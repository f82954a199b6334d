"""Checks before a read: the channel exists, and committed bulk files are imported.

A missing channel is an error, not an empty result, and a reader never creates a channel.
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

__all__ = [
    "check_directory",
    "check_exists_in_log",
    "exists",
    "import_waiting",
    "start_for_reading",
]


async def start_for_reading(backend: Backend, plan: Plan) -> None:
    """Start a backend for a read, and wait until committed bulk files are imported.

    Raises:
        QueueNotFound: The native directory does not exist; it is not created.
    """
    if is_bulk(plan):
        check_directory(plan)
    await backend.start()
    if is_bulk(plan):
        await _wait_for_import(plan)


async def exists(backend: Backend, plan: Plan) -> bool:
    """Return whether the channel or dead-letter queue to read exists; create nothing.

    Returns:
        False if the plan reads dead letters and the channel has no dead-letter queue yet.

    Raises:
        QueueNotFound: The channel does not exist. Not raised for Redis pub/sub, where the server
            stores nothing about a channel.
    """
    topics_only = not backend.capabilities.queues
    if topics_only and not plan.dead_letters:
        return True
    if await _channel_exists(
        backend, plan.queue, broadcast=plan.broadcast and not plan.dead_letters
    ):
        return True
    channel = plan.settings.broker_name(plan.channel)
    if plan.dead_letters and (
        topics_only or await _channel_exists(backend, channel, broadcast=plan.broadcast)
    ):
        return False
    raise _not_found(plan, backend.name)


async def _channel_exists(backend: Backend, queue: str, *, broadcast: bool) -> bool:
    if isinstance(backend, Admin) and not broadcast:
        with suppress(QueueNotFound):
            await backend.stats(queue)
            return True
    try:  # this also finds a Redis list that another program created
        await backend.declare(QueueSpec(name=queue, broadcast=broadcast, passive=True))
    except QueueNotFound:
        return False
    return True


def _not_found(plan: Plan, backend: str) -> QueueNotFound:
    location = plan.settings.safe_url or str(plan.settings.path)
    return QueueNotFound(
        f"there is no channel {plan.channel!r} in {location}: check the name and the address; "
        "reading does not create a channel",
        backend=backend,
        operation="read",
        queue=plan.channel,
    )


# Native directories


def check_directory(plan: Plan) -> Path:
    """Return the native directory.

    Raises:
        QueueNotFound: The directory has neither a log nor bulk files.
    """
    path = Path(native_path(plan))
    if not (path / "log").is_dir() and not published_jobs(path):
        raise _not_found(plan, "native")
    return path


def check_exists_in_log(plan: Plan) -> None:
    """Raise ``QueueNotFound`` if the log of the native directory does not contain the channel.

    A stream of dead letters needs only the channel: the dead-letter queue may be created later.
    """
    existing = channels(native_path(plan))
    wanted = {plan.queue, plan.settings.broker_name(plan.channel)}
    if not existing & wanted:
        raise _not_found(plan, "native")


async def import_waiting(plan: Plan) -> None:
    """Wait until the bulk files that are already committed are in the log.

    The owner of the directory imports them. If there is no owner, this process becomes the owner
    until they are imported.

    Raises:
        BackendUnavailable: There is an owner, but it did not import them in time.
        LogDamaged: A bulk file that may contain messages of this channel is damaged.
        ConfigError: A bulk file declares this channel with an invalid configuration.
    """
    path = check_directory(plan)
    if not published_jobs(path):
        return
    backend = open_backend(plan.settings, SystemClock())
    try:
        await backend.start()
    except BackendUnavailable as error:  # an owner on another machine imports them
        logger.warning("%s: %s", plan.channel, error)
    try:
        await _wait_for_import(plan)
    finally:
        await backend.aclose()


async def _wait_for_import(plan: Plan) -> None:
    queues = {plan.queue, plan.settings.broker_name(plan.channel)}
    for error in await wait_for_import(Path(native_path(plan)), queues):
        logger.warning("%s: ignoring a bulk file of another channel: %s", plan.channel, error)
