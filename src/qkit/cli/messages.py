"""``send``, ``peek`` and ``consume``: send, show and receive messages."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn
from rich.text import Text

from qkit._internal.clock import SystemClock
from qkit.admin.views import MessageView, body_view
from qkit.backend import (
    Backend,
    Delivery,
    SubscriptionSpec,
    UnheardReporting,
)
from qkit.backends.factory import open_backend
from qkit.cli.common import FAILED, AsJson, Config, command, find_settings, run, service, service_on
from qkit.cli.terminal import (
    ago,
    block,
    body_text,
    count,
    err,
    out,
    print_json,
    print_json_line,
    print_note,
    safe_line,
)
from qkit.consuming.raw_subscription import RawSubscription, subscribe_raw
from qkit.errors import ConfigError, PartialSend, QueueError, QueueNotFound, Unsupported
from qkit.handlers.channel import undeclared
from qkit.message import Envelope, Message, Sent
from qkit.queue_lookup import suggest_name
from qkit.sending.envelope_builder import SendOptions
from qkit.service import QueueService
from qkit.wiring import Wiring

__all__ = ["consume", "peek", "send"]

SEND_BATCH_SIZE = 500
MAX_IN_FLIGHT = 1_000  # messages in flight in ``consume`` without --ack

Queue = Annotated[str, typer.Argument(metavar="QUEUE", help="Name of the channel.")]


@command
def send(
    queue: Queue,
    body: Annotated[
        str | None,
        typer.Argument(
            metavar="JSON", help="Body; if omitted or -, each line of stdin is a message."
        ),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Send the content of a file as one message.")
    ] = None,
    lines: Annotated[
        Path | None,
        typer.Option("--lines", help="Send each line of a file as a message; - is stdin."),
    ] = None,
    priority: Annotated[
        int | None,
        typer.Option(help="Priority; messages with a higher number are delivered first."),
    ] = None,
    delay: Annotated[
        float | None, typer.Option(help="Seconds until the message may be delivered.")
    ] = None,
    ttl: Annotated[float | None, typer.Option(help="Seconds until the message expires.")] = None,
    key: Annotated[
        str | None, typer.Option(help="Messages with the same key keep their order.")
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option("--header", "-H", metavar="NAME=VALUE", help="Header; may be repeated."),
    ] = None,
    broadcast: Annotated[
        bool, typer.Option("--broadcast", help="Publish to a topic: every group receives a copy.")
    ] = False,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Send messages from an argument, a file or stdin.

    [dim]qkit send orders '{"id": 1}' · qkit send orders --priority 9 < orders.jsonl[/]
    """
    options = _send_options(priority, delay, ttl, key, header or [])
    bodies, total = _bodies(body, file, lines)
    find_settings(config).require_mode()
    ids, unheard, note = run(_send(queue, bodies, total, options, broadcast, config))
    if note:
        print_note(note, "yellow")
    _report_sent(queue, ids, unheard, as_json)


def _send_options(
    priority: int | None,
    delay: float | None,
    ttl: float | None,
    key: str | None,
    headers: list[str],
) -> SendOptions:
    options = SendOptions(headers=_headers(headers))
    if priority is not None:
        options["priority"] = priority
    if delay is not None:
        options["delay"] = delay
    if ttl is not None:
        options["ttl"] = ttl
    if key is not None:
        options["key"] = key
    return options


def _bodies(
    body: str | None, file: Path | None, lines: Path | None
) -> tuple[Iterable[object], int | None]:
    """Return the bodies to send, and their number if it is known."""
    if body == "-" and lines is None:  # as in other programs, - means stdin
        body, lines = None, Path("-")
    if sum(source is not None for source in (body, file, lines)) > 1:
        raise ConfigError("give only one of: a JSON argument, --file, --lines")
    if body is not None:
        return [_parsed(body, "the argument")], 1
    if file is not None:
        return [_parsed(file.read_text(), str(file))], 1
    return _lines(lines)


def _report_sent(queue: str, ids: list[str], unheard: int, as_json: bool) -> None:
    """Print the ids or the number of messages; exit with 1 if messages had no subscriber."""
    if as_json:
        summary: dict[str, object] = {"sent": len(ids), "message_ids": ids}
        print_json({**summary, "unheard": unheard} if unheard else summary)
    elif len(ids) == 1:
        out.print(Text(safe_line(ids[0])))
    else:
        print_note(f"{count(len(ids), 'message')} sent to {queue}.", "green")
    if unheard:
        print_note(
            f"{unheard} of {count(len(ids), 'message')} had no subscriber and "
            f"{'is' if unheard == 1 else 'are'} lost: Redis pub/sub does not store messages.",
            "red",
        )
        raise typer.Exit(FAILED)


async def _send(
    queue: str,
    bodies: Iterable[object],
    total: int | None,
    options: SendOptions,
    broadcast: bool,
    config: Path | None,
) -> tuple[list[str], int, str]:
    """Send messages; return their ids, how many had no subscriber, and a note about the queue."""
    ids: list[str] = []
    declares, note = await _is_new(queue, config)
    bar = Progress(
        TextColumn("sending"), BarColumn(), MofNCompleteColumn(),
        TaskProgressColumn(show_speed=True), console=err, transient=True,
        disable=total == 1 or not err.is_terminal,
    )  # fmt: skip
    async with service_on(config, declares=declares) as (running, backend):
        with bar:
            task = bar.add_task("sending", total=total)
            try:
                for batch in _batches(bodies):
                    await _send_batch(running, queue, batch, options, broadcast, ids)
                    bar.update(task, completed=len(ids))
            except Exception:
                if ids or total != 1:
                    print_note(f"{count(len(ids), 'message')} sent before the error.", "yellow")
                raise
    unheard = backend.unheard if isinstance(backend, UnheardReporting) else 0
    return ids, unheard, note


async def _is_new(queue: str, config: Path | None) -> tuple[bool, str]:
    """Return whether the send must declare the queue, and a note if the queue does not exist."""
    async with service(config) as running:
        try:
            await running.stats(queue)
        except Unsupported:
            return True, ""
        except QueueNotFound:
            near = await suggest_name(running, queue)
            hint = f" Did you mean {near}?" if near else ""
            return True, f"{queue} did not exist: this send created it.{hint}"
        return False, ""


async def _send_batch(
    running: QueueService, queue: str, bodies: list[object], options: SendOptions, broadcast: bool,
    ids: list[str],
) -> None:  # fmt: skip
    """Send a batch; add the id of each confirmed message to ``ids``, even if others fail."""
    if broadcast:
        for body in bodies:
            ids.append((await running.publish(queue, body, **options)).message_id)
        return
    try:
        ids += [item.message_id for item in await running.send_many(queue, bodies, **options)]
    except PartialSend as partial:
        ids += [item.message_id for item in partial.results if isinstance(item, Sent)]
        raise


def _batches(bodies: Iterable[object]) -> Iterator[list[object]]:
    batch: list[object] = []
    for body in bodies:
        batch.append(body)
        if len(batch) == SEND_BATCH_SIZE:
            yield batch
            batch = []
    if batch:
        yield batch


def _lines(path: Path | None) -> tuple[Iterable[object], int | None]:
    """Return a body for each line that is not empty, and the number of bodies if it is known."""
    if path is None and sys.stdin.isatty():
        raise ConfigError(
            "nothing to send: give a JSON argument, --file, --lines, or lines on stdin"
        )
    if path is None or str(path) == "-":
        return (
            _parsed(line, f"line {at}") for at, line in enumerate(sys.stdin, 1) if line.strip()
        ), None
    texts = path.read_text().splitlines()
    bodies = [
        _parsed(line, f"{path}, line {at}") for at, line in enumerate(texts, 1) if line.strip()
    ]
    return bodies, len(bodies)


def _parsed(text: str, where: str) -> object:
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{where} is not JSON ({error}); a string needs quotes: '\"hello\"'"
        ) from None
    return value


def _headers(pairs: list[str]) -> dict[str, str]:
    for pair in pairs:
        if "=" not in pair:
            raise ConfigError(f"--header: expected NAME=VALUE, got {pair!r}")
    return dict(pair.split("=", 1) for pair in pairs)


@command
def peek(
    queue: Queue,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, help="Maximum number of messages.")
    ] = 10,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Show the next messages of a queue without consuming them."""

    async def main() -> list[Message]:
        async with service(config) as running:
            return await running.peek(queue, limit)

    found = [MessageView.of(message) for message in run(main())]
    if as_json:
        print_json([asdict(view) for view in found])
    elif not found:
        print_note(f"{queue} has no ready messages.", "dim")
    else:
        for view in found:
            facts = [] if view.priority is None else [f"priority {view.priority}"]
            facts += [f"attempt {view.attempt}"] if view.attempt > 1 else []
            facts += [] if view.sent_at is None else [f"sent {ago(view.sent_at)}"]
            out.print(block(view.id, facts, body_text(view.body)))


@command
def consume(
    queue: Queue,
    ack: Annotated[
        bool, typer.Option("--ack", help="Ack the messages, which removes them.")
    ] = False,
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", min=1, help="Stop after this number of messages.")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(min=0, help="Stop after this many seconds without a message.")
    ] = None,
    group: Annotated[str, typer.Option(help="Group to join, for a topic or on Kafka.")] = "qkit",
    broadcast: Annotated[bool, typer.Option("--broadcast", help="Consume a topic.")] = False,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Print messages as they arrive, until Ctrl-C.

    Without [bold]--ack[/], messages stay in flight and are released at the end,
    without counting an attempt. Without --ack and --limit, the command stops after 1,000
    messages.
    """
    show: Callable[[Envelope], None] = _show_json if as_json else _show
    seen = run(_consume(queue, ack, limit, timeout, group, broadcast, config, show))
    action = "acked" if ack else "shown and released"
    at_limit = not ack and limit is None and seen >= MAX_IN_FLIGHT
    hint = " This is the limit without --ack." if at_limit else ""
    print_note(f"{count(seen, 'message')} {action}.{hint}", "dim")


async def _consume(
    queue: str,
    ack: bool,
    limit: int | None,
    timeout: float | None,
    group: str,
    broadcast: bool,
    config: Path | None,
    show: Callable[[Envelope], None],
) -> int:
    async with service(config) as running:
        # Raises QueueNotFound if there is no such queue: a subscription would create it.
        await running.stats(queue)
    settings = find_settings(config)
    clock = SystemClock()
    backend = open_backend(settings, clock)
    await backend.start()
    try:
        wiring = Wiring.build(backend, settings, clock)
        route = wiring.routes.resolve(undeclared(queue, broadcast=broadcast))
        spec = SubscriptionSpec(
            queue=route.queue,
            group=group,
            consumer=f"{socket.gethostname()}-{os.getpid()}-cli",
            prefetch=min(limit or MAX_IN_FLIGHT, MAX_IN_FLIGHT),
            broadcast=broadcast,
            ack_deadline=settings.ack_deadline,
        )
        async with subscribe_raw(wiring, route, spec) as received:
            observer = _Observer(backend, received, settings.ack_deadline)
            return await observer.run(
                ack, limit or (10**12 if ack else MAX_IN_FLIGHT), timeout, show
            )
    finally:
        await backend.aclose()


class _Observer:
    """Receiver that prints messages; without ``ack``, they stay in flight until ``run`` ends."""

    def __init__(self, backend: Backend, received: RawSubscription, lease: float) -> None:
        self._received = received
        self._subscription = received.subscription
        self._lease = lease if backend.capabilities.lease else None
        self._in_flight: list[Delivery] = []

    async def run(
        self, ack: bool, limit: int, timeout: float | None, show: Callable[[Envelope], None]
    ) -> int:
        seen = 0
        renewing = asyncio.create_task(self._renew(), name="qkit leases")
        try:
            with suppress(TimeoutError, KeyboardInterrupt, asyncio.CancelledError):
                while seen < limit:
                    async with asyncio.timeout(timeout):
                        found = await self._received.receive(min(limit - seen, SEND_BATCH_SIZE))
                    for delivery in found:
                        show(delivery.envelope)
                        seen += 1
                        if ack:
                            await self._subscription.ack(delivery)
                        else:
                            self._in_flight.append(delivery)
        finally:
            renewing.cancel()
            for delivery in self._in_flight:
                with suppress(QueueError):  # the lease expired, which released the message
                    await self._subscription.release(delivery, 0.0, count_attempt=False)
        return seen

    async def _renew(self) -> None:
        while self._lease is not None:
            await asyncio.sleep(self._lease / 3)
            for delivery in list(self._in_flight):
                with suppress(QueueError):
                    await self._subscription.extend(delivery, self._lease)


def _show(envelope: Envelope) -> None:
    body = body_text(body_view(envelope.body, envelope.headers))
    line = Text()
    line.append(safe_line(envelope.id), style="dim")
    if envelope.attempt > 1:
        line.append(f"  attempt {envelope.attempt}", style="yellow")
    line.append(f"  {safe_line(body)}")
    out.print(line, soft_wrap=True)


def _show_json(envelope: Envelope) -> None:
    """Print the message as one line of JSON, so that a program can read the stream."""
    record: dict[str, Any] = {
        "id": envelope.id,
        "body": asdict(body_view(envelope.body, envelope.headers)),
        "headers": envelope.headers,
        "key": envelope.key,
        "priority": envelope.priority,
        "attempt": envelope.attempt,
    }
    print_json_line(record)
