"""A web shop: orders arrive by HTTP, travel through a queue, and are handled in the same process.

Run it with ``python examples/fastapi_app.py`` and look at http://127.0.0.1:8000/queues/ . ``PORT``
chooses another port, ``QKIT_PATH=data`` keeps orders across restarts, and with ``QKIT_TOKEN`` the
page may change things.
"""

from __future__ import annotations

import asyncio
import os

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from starlette.responses import Response

from qkit import Channel, Message, QueueService, Settings, consume
from qkit.web import create_app, lifespan, readiness


class Order(BaseModel):
    """What a customer bought."""

    id: int
    total: float


orders: Channel[Order] = Channel("orders", Order)
service = QueueService(Settings())


@consume(orders, concurrency=8)
async def book(order: Order, message: Message) -> None:
    """Book one order; on SIGTERM those that have begun are finished."""
    await asyncio.sleep(0.02)  # the work
    print(f"booked {message.id}", flush=True)


service.register(book)
app = FastAPI(title="shop", lifespan=lifespan(service))
app.mount("/queues", create_app(service, token=os.environ.get("QKIT_TOKEN")))


@app.post("/orders", status_code=202)
async def place(order: Order) -> dict[str, str]:
    """Accept an order: it is on the queue when the answer leaves."""
    sent = await service.send(orders, order)
    return {"message_id": sent.message_id}


@app.get("/readyz")
async def readyz() -> Response:
    """Whether this process should get requests: 503 from the first moment of its shutdown."""
    return readiness(service)


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(os.environ.get("PORT", "8000")))
