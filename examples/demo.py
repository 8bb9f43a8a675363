"""The tour that `make demo` runs: real processes, a real kill -9, and a proof at the end.

Act 1, the file half. A coordinator hands 24 jobs to three workers through a `Queue`; everybody tells a `Bus`
what happens. Half way one worker is killed with -9. The coordinator notices that answers are missing and
gives those jobs to the others. Every process keeps a ledger of what was acknowledged to it; at the end each
entry of each ledger must be found in the logs, exactly once.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from postroom import Bus, Queue

JOBS = 24
WORKERS = ("ada", "ben", "cho")
VICTIM = "ben"
KILL_AFTER_JOBS = 3
PATIENCE_S = 1.0  # the coordinator asks somebody else when an answer takes longer
TIME_LIMIT_S = 60.0
ROTATE_BYTES = 8_000  # small, so that the tour shows rotation too

BIN = Path(sys.executable).parent


class Post:
    """A process's bus, queue and ledger. The ledger is written only after a call has returned."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.bus = Bus(folder / "bus.yaml", rotate_bytes=ROTATE_BYTES)
        self.queue = Queue(folder / "queue")
        self._ledger = os.open(folder / f"{name}.ledger", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def tell(self, kind: str, task: str, body: str, parents: tuple[str, ...] = ()) -> str:
        """Tell everybody."""
        msg_id = self.bus.append(
            type=kind, project_id="demo", task_id=task, run_id=self.name, parents=parents, body=body
        )
        os.write(self._ledger, f"bus {msg_id}\n".encode())
        return msg_id

    def send(self, topic: str, body: str, to: str, reply_to: str | None = None) -> str:
        """Send to one agent."""
        msg_id = self.queue.send(topic, body, to=to, sender=self.name, reply_to=reply_to)
        os.write(self._ledger, f"queue {msg_id}\n".encode())
        return msg_id


def work(folder: Path, name: str) -> None:
    """A worker: take a job, say so, do it, answer."""
    post = Post(folder, name)
    post.tell("worker_ready", "", f"{name} has process id {os.getpid()}")
    while True:
        for message in post.queue.poll(name, wait_s=TIME_LIMIT_S):
            if message["topic"] == "broadcast":
                return
            number = int(message["body"])
            started = post.tell("job_started", message["body"], "")
            time.sleep(0.02)  # the work itself
            post.tell("job_done", message["body"], f"{number}² = {number**2}", (started,))
            post.send("answer", str(number**2), message["from"], message["msg_id"])


def coordinate(folder: Path) -> None:
    """The coordinator: ask for every job, and ask somebody else when an answer does not come."""
    post = Post(folder, "coordinator")
    jobs = range(1, JOBS + 1)
    asked = {
        post.send("ask", str(job), WORKERS[job % len(WORKERS)]): (job, WORKERS[job % len(WORKERS)])
        for job in jobs
    }
    post.tell("jobs_sent", "", f"{JOBS} jobs for {', '.join(WORKERS)}")
    results: dict[int, int] = {}
    heard = time.monotonic()
    while len(results) < JOBS:
        for message in post.queue.poll("coordinator", "answer", wait_s=0.2):
            job, _ = asked[str(message["in_reply_to"])]
            results[job] = int(message["body"])
            heard = time.monotonic()
        if time.monotonic() - heard > PATIENCE_S:
            missing = {job: worker for job, worker in asked.values() if job not in results}
            silent_workers = ", ".join(set(missing.values()))
            post.tell("answers_missing", "", f"jobs {sorted(missing)} from {silent_workers}")
            for job, silent in missing.items():
                other = WORKERS[(WORKERS.index(silent) + 1) % len(WORKERS)]
                asked[post.send("ask", str(job), other)] = (job, other)
            heard = time.monotonic()
    right = all(results[job] == job**2 for job in jobs)
    post.send("broadcast", "that is all", "all")
    post.tell("finished", "", f"{len(results)} answers, {'all right' if right else 'SOME WRONG'}")


def narrate(folder: Path, workers: dict[str, subprocess.Popen[bytes]]) -> None:
    """Follow the bus as it happens, across its rotations, and kill one worker on the way."""
    bus = Bus(folder / "bus.yaml")
    done: Counter[str] = Counter()
    deadline = time.monotonic() + TIME_LIMIT_S
    for message in bus.follow(archives=True, stop=lambda: time.monotonic() > deadline):
        done[message.run_id] += message.type == "job_done"
        if message.type != "job_started":
            print(f"  {message.ts:%H:%M:%S.%f}  {message.run_id:<12} {message.type:<16} {message.body}")
        if done[VICTIM] == KILL_AFTER_JOBS and workers[VICTIM].poll() is None:
            workers[VICTIM].send_signal(signal.SIGKILL)
            workers[VICTIM].wait()
            print(f"  {'':15}  {'':12} kill -9          {VICTIM} is dead, in the middle of its work")
        if message.type == "finished":
            return
    sys.exit("the demo did not finish in time")


def ledger_entries(folder: Path) -> Iterator[tuple[str, str]]:
    """Everything that was acknowledged to anybody, as (log, id)."""
    for ledger in sorted(folder.glob("*.ledger")):
        for line in ledger.read_text().splitlines():
            log, msg_id = line.split()
            yield log, msg_id


def prove(folder: Path) -> bool:
    """Every acknowledged id is in its log, exactly once, and both logs are whole."""
    bus, queue = Bus(folder / "bus.yaml"), Queue(folder / "queue")
    stored = {
        "bus": Counter(message.msg_id for message in bus.scan(archives=True)),
        "queue": Counter(message["msg_id"] for message in queue.tail(1_000_000, include_expired=True)),
    }
    fine = True
    for log, counts in stored.items():
        ids = [msg_id for name, msg_id in ledger_entries(folder) if name == log]
        lost = sum(counts[msg_id] == 0 for msg_id in ids)
        doubled = sum(count > 1 for count in counts.values())
        print(f"  {log:<6} acknowledged {len(ids):>4}   stored {counts.total():>4}   "
              f"lost {lost}   doubled {doubled}")  # fmt: skip
        fine = fine and bool(ids) and not lost and not doubled
    files = [bus.path, *bus.archives()]
    damaged = sum(len(Bus(path).verify().damaged) for path in files) + len(queue.check().unreadable)
    print(f"  {len(files)} bus files ({len(files) - 1} rotated) and the queue file: {damaged} damaged places")
    return fine and not damaged


def show(folder: Path, *command: str) -> None:
    """Run one of the installed commands the way a person would."""
    shown = [word.replace(f"{folder}{os.sep}", "") for word in command]
    print(f"\n$ {' '.join(shown)}", flush=True)
    subprocess.run([BIN / command[0], *command[1:]], check=True)


def act_one(folder: Path) -> bool:
    """The file half: no server anywhere."""
    print("Act 1: a coordinator, three workers, one queue, one bus, no server\n")
    with Queue(folder / "queue") as queue:
        for name in ("coordinator", *WORKERS):
            queue.register(name)  # from now on a message to an unknown name would be reported
    me = [sys.executable, __file__, "--folder", str(folder), "--role"]
    with subprocess.Popen([*me, "coordinator"]) as coordinator:
        workers = {name: subprocess.Popen([*me, name]) for name in WORKERS}
        try:
            narrate(folder, workers)
            for name in set(WORKERS) - {VICTIM}:
                workers[name].wait(timeout=TIME_LIMIT_S)
        finally:
            for process in (coordinator, *workers.values()):
                if process.poll() is None:
                    process.kill()
                process.wait()
    show(folder, "postroom", "bus", "tail", "-n", "3", "--bus", str(folder / "bus.yaml"))
    show(folder, "postroom", "queue", "status", "--root", str(folder / "queue"))
    print("\nThe proof: what was acknowledged to anybody, the killed worker included, against the files\n")
    return prove(folder)


def main() -> None:
    """Run the tour, or one of its roles."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--folder", type=Path, help="keep the files here (default: a temporary folder)")
    parser.add_argument("--role", choices=("coordinator", *WORKERS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role == "coordinator":
        coordinate(arguments.folder)
    elif arguments.role:
        work(arguments.folder, arguments.role)
    else:
        tour(arguments.folder)


def tour(kept: Path | None) -> None:
    """All acts, in a folder of their own."""
    with tempfile.TemporaryDirectory(prefix="postroom-demo-") as temporary:
        folder = kept or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            sys.exit(f"{folder} is not empty: the demo wants a folder of its own")
        fine = act_one(folder)
    print(f"\n{'Nothing acknowledged was lost.' if fine else 'SOMETHING IS WRONG.'}")
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
