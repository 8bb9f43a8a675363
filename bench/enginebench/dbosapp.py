"""The DBOS application, a worker of one queue on SQLite: `python -m enginebench.dbosapp URL`.

It prints a line when it is ready and stops at the end of its standard input.
"""

import sys

from dbos import DBOS, DBOSConfig

from enginebench import finish

NAME, QUEUE, WORKFLOW, VERSION = "enginebench", "engine", "note", "1"
POLL_S = 0.1  # as it comes, it looks once a second


@DBOS.workflow(name=WORKFLOW)
def note(run: str, number: int, count: int) -> None:
    finish.note(run, number, count)


def main(url: str) -> None:
    config: DBOSConfig = {
        "name": NAME,
        "system_database_url": url,
        "application_version": VERSION,
        "log_level": "ERROR",
    }
    DBOS(config=config)
    DBOS.launch()
    DBOS.register_queue(QUEUE, polling_interval_sec=POLL_S)
    print("ready", flush=True)
    sys.stdin.read()
    DBOS.destroy()


if __name__ == "__main__":
    main(*sys.argv[1:])
