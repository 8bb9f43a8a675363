"""The sides of the throughput bench: each submits from this process and works in one process of its own."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import dramatiq
from dbos import DBOSClient
from dramatiq.brokers.rabbitmq import RabbitmqBroker

from enginebench import celeryapp, dbosapp, dramatiqapp, finish
from enginebench.engines import PATIENCE_S, TYPE, environment, open_engine, url_in, workers

CALLERS = 100
"""Coroutines that submit at the same time."""
SLOTS = 100
"""Messages that our worker has at a time, as many as Celery prefetches."""
THREADS = 4
"""Threads that submit to a peer at the same time: more of them are not faster."""


class Side(Protocol):
    """A queue with a running worker."""

    def submit(self, run: str, count: int) -> None:
        """Submit messages one by one, each acknowledged when it is stored."""


Opener = Callable[[Path, str], contextlib.AbstractContextManager[Side]]
"""Opens a side in a folder, with the URL of a RabbitMQ that it may use."""


class Ours:
    """The engine, called by coroutines; what waits at the same time shares a commit."""

    def __init__(self, folder: Path) -> None:
        self.engine = open_engine(url_in(folder))

    def submit(self, run: str, count: int) -> None:
        self.engine.blocking.wait(self._submit_all(run, count))

    async def _submit_all(self, run: str, count: int) -> None:
        numbers = iter(range(count))

        async def caller() -> None:
            for number in numbers:
                payload = {"run": run, "number": number, "count": count}
                await self.engine.submit(type=TYPE, org_id="acme", payload=payload)

        await asyncio.gather(*(caller() for _ in range(CALLERS)))


@contextlib.contextmanager
def ours(folder: Path, _broker: str) -> Iterator[Ours]:
    side = Ours(folder)
    with workers(url_in(folder), "noting", slots=SLOTS, variables={finish.FOLDER: str(folder)}) as begin:
        begin()
        yield side
    side.engine.close()


class Threaded:
    """A peer, called by threads, so that they wait for their acknowledgements at the same time."""

    def __init__(self, pool: ThreadPoolExecutor, send: Callable[[str, int, int], Any]) -> None:
        self._pool = pool
        self._send = send

    def submit(self, run: str, count: int) -> None:
        for _ in self._pool.map(lambda number: self._send(run, number, count), range(count)):
            pass


@contextlib.contextmanager
def threaded(send: Callable[[str, int, int], Any]) -> Iterator[Threaded]:
    """A peer whose threads stay, because they keep connections."""
    with ThreadPoolExecutor(THREADS) as pool:
        yield Threaded(pool, send)


@contextlib.contextmanager
def celery(folder: Path, broker: str) -> Iterator[Threaded]:
    """Celery with one worker of the pool `solo`."""
    app = celeryapp.prefetching(broker)

    def send(*arguments: Any) -> None:
        app.send_task(celeryapp.TASK, arguments, queue=celeryapp.QUEUE)

    words = ["-m", "celery", "-A", "enginebench.celeryapp", "worker", "-P", "solo", "-Q", celeryapp.QUEUE]
    words += ["--without-gossip", "--without-mingle", "-l", "ERROR"]
    with child(words, {celeryapp.BROKER: broker, finish.FOLDER: str(folder)}), threaded(send) as side:
        yield side
    app.close()


@contextlib.contextmanager
def dramatiq_confirmed(folder: Path, url: str) -> Iterator[Threaded]:
    """Dramatiq with one worker process, whose publisher waits until RabbitMQ has stored a message."""
    with _dramatiq(folder, url, confirm=True) as side:
        yield side


@contextlib.contextmanager
def dramatiq_as_it_comes(folder: Path, url: str) -> Iterator[Threaded]:
    """The same without confirms: a message that RabbitMQ did not store is lost without an error."""
    with _dramatiq(folder, url, confirm=False) as side:
        yield side


@contextlib.contextmanager
def _dramatiq(folder: Path, url: str, *, confirm: bool) -> Iterator[Threaded]:
    url = url.removesuffix("//") + "/%2F"  # as pika names the same virtual host
    broker = RabbitmqBroker(url=url, confirm_delivery=confirm)
    broker.declare_queue("default")

    def send(*arguments: Any) -> None:
        broker.enqueue(
            dramatiq.Message(
                queue_name="default", actor_name=dramatiqapp.ACTOR, args=arguments, kwargs={}, options={}
            )
        )

    words = ["-m", "dramatiq", "enginebench.dramatiqapp", "--processes", "1"]
    with child(words, {dramatiqapp.BROKER: url, finish.FOLDER: str(folder)}), threaded(send) as side:
        yield side
    broker.close()


@contextlib.contextmanager
def dbos(folder: Path, _broker: str) -> Iterator[Threaded]:
    """DBOS on SQLite."""
    url = f"sqlite:///{folder}/dbos.db"
    with child(["-m", "enginebench.dbosapp", url], {finish.FOLDER: str(folder)}, waits=True):
        client = DBOSClient(system_database_url=url)

        def send(*arguments: Any) -> None:
            client.enqueue(
                {
                    "queue_name": dbosapp.QUEUE,
                    "workflow_name": dbosapp.WORKFLOW,
                    "app_version": dbosapp.VERSION,
                },
                *arguments,
            )

        with threaded(send) as side:
            yield side
        client.destroy()


@contextlib.contextmanager
def child(words: list[str], variables: Mapping[str, str], *, waits: bool = False) -> Iterator[None]:
    """A Python process that is stopped at the end. `waits` waits until it says that it is ready."""
    process = subprocess.Popen(
        [sys.executable, *words],
        env=environment(variables),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE if waits else subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        if waits:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        yield
    finally:
        if not waits:
            process.terminate()
        process.communicate(timeout=PATIENCE_S)  # closes the input
