"""Tables in the order of what they are made of, several at once."""

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

Needs = Mapping[str, Sequence[str]]
"""The names of the tables, the most urgent first, and what each is made of."""


def in_turn(needs: Needs, do: Callable[[str], None], at_once: int) -> None:
    """Do each name once, after all that it needs. One waits only for names that are listed before it.

    A job of Spark leaves cores idle while it is planned, compiled and committed, so another one fills them.
    The first failure is raised, after what had begun by then; nothing is begun after it.
    """
    waiting = list(needs)
    running: dict[Future[None], str] = {}
    with ThreadPoolExecutor(at_once, thread_name_prefix="table") as pool:
        while waiting or running:
            for name in _ready(waiting, running.values(), needs)[: at_once - len(running)]:
                waiting.remove(name)
                running[pool.submit(do, name)] = name
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                del running[future]
                future.result()


def _ready(waiting: Sequence[str], running: Collection[str], needs: Needs) -> list[str]:
    ready, unfinished = [], set(running)
    for name in waiting:
        if unfinished.isdisjoint(needs[name]):
            ready.append(name)
        unfinished.add(name)
    return ready
