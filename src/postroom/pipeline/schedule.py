"""Runs a job for each table after the jobs of its inputs, several at once."""

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

Dependencies = Mapping[str, Sequence[str]]
"""The names of the tables, the most urgent first, each with its inputs."""


def run_in_order(inputs: Dependencies, run: Callable[[str], None], at_once: int) -> None:
    """Call `run` once for each name, after its inputs. Inputs that are listed later are not waited for.

    A Spark job leaves cores idle while it is planned, compiled and committed; another job then uses them.
    After a failure no further job starts. It is raised when the running jobs have ended.
    """
    waiting = list(inputs)
    running: dict[Future[None], str] = {}
    with ThreadPoolExecutor(at_once, thread_name_prefix="table") as pool:
        while waiting or running:
            for name in _ready(waiting, running.values(), inputs)[: at_once - len(running)]:
                waiting.remove(name)
                running[pool.submit(run, name)] = name
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                del running[future]
                future.result()


def _ready(waiting: Sequence[str], running: Collection[str], inputs: Dependencies) -> list[str]:
    ready, unfinished = [], set(running)
    for name in waiting:
        if unfinished.isdisjoint(inputs[name]):
            ready.append(name)
        unfinished.add(name)
    return ready
