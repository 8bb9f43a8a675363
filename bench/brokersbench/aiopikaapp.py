"""Bare aio-pika as a side of the bench: `python -m brokersbench.aiopikaapp URL` works until its input ends.

It does what a lane of the engine does in the broker, and nothing else: a durable queue, persistent messages,
publisher confirms, the same prefetch, and an acknowledgement after each handler.
"""

import asyncio
import json
import sys

import aio_pika
from enginebench import finish

from postroom.stores.rabbitmq.store import PREFETCH_DEFAULT

QUEUE = "aiopika"


async def work(url: str) -> None:
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), ended.set)
    async with await aio_pika.connect(url) as connection:
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=PREFETCH_DEFAULT)
        queue = await channel.declare_queue(QUEUE, durable=True)

        async def handle(message: aio_pika.abc.AbstractIncomingMessage) -> None:
            finish.note(*json.loads(message.body))
            await message.ack()

        await queue.consume(handle)
        print("ready", flush=True)
        await ended.wait()


class AioPika:
    """Publishes from many coroutines, each of which waits for its confirm."""

    def __init__(self, url: str, callers: int) -> None:
        self._url = url
        self._callers = callers
        self._runner = asyncio.Runner()
        self._channel = self._runner.run(self._connect())

    async def _connect(self) -> aio_pika.abc.AbstractChannel:
        self._connection = await aio_pika.connect(self._url)
        return await self._connection.channel(publisher_confirms=True)

    def submit(self, run: str, count: int) -> None:
        self._runner.run(self._submit_all(run, count))

    async def _submit_all(self, run: str, count: int) -> None:
        numbers = iter(range(count))

        async def caller() -> None:
            for number in numbers:
                body = json.dumps([run, number, count]).encode()
                message = aio_pika.Message(body, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
                await self._channel.default_exchange.publish(message, QUEUE)

        await asyncio.gather(*(caller() for _ in range(self._callers)))

    def close(self) -> None:
        self._runner.run(self._connection.close())
        self._runner.close()


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1]))
