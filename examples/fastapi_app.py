"""Web shop that receives orders over HTTP, queues them and handles them in the same process.

Run it with ``python examples/fastapi_app.py`` and open http://127.0.0.1:8000/queues/ . ``PORT``
changes the port. ``QKIT_PATH=data`` keeps orders across restarts. ``QKIT_TOKEN`` sets the token
that allows changes in the dashboard.
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
    """A customer's order."""

    id: int
    total: float


orders: Channel[Order] = Channel("orders", Order)
service = QueueService(Settings())


@consume(orders, concurrency=8)
async def book(order: Order, message: Message) -> None:
    """Book one order; on SIGTERM, running calls finish before the service stops."""
    await asyncio.sleep(0.02)  # simulated work
    print(f"booked {message.id}", flush=True)


service.register(book)
app = FastAPI(title="shop", lifespan=lifespan(service))
app.mount("/queues", create_app(service, token=os.environ.get("QKIT_TOKEN")))


@app.post("/orders", status_code=202)
async def place(order: Order) -> dict[str, str]:
    """Accept an order; it is in the queue before the response is sent."""
    sent = await service.send(orders, order)
    return {"message_id": sent.message_id}


@app.get("/readyz")
async def readyz() -> Response:
    """Report readiness; respond with 503 as soon as the shutdown starts."""
    return readiness(service)


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(os.environ.get("PORT", "8000")))
