"""The tour that `make demo` runs: real processes, a real kill -9, and a proof at the end.

Act 1, files. A coordinator sends 24 jobs to three workers through a `Queue`; all of them write to a `Bus`.
Half way one worker is killed with -9. The coordinator notices that answers are missing and sends those jobs
to the others. Every process keeps a ledger of the ids that were acknowledged to it. At the end each entry of
each ledger must be in the logs, exactly once.

Act 2, tasks. A harness serves a task queue, and three agents work on it. One is killed with -9 while it holds
a task. Another is stopped until its lease has ended and another agent has done its task; when it continues,
its result is refused. At the end every acknowledged task was done once, and its decision was executed.

Act 3, mailboxes. A mail server is killed with -9, and the published SDK of mq9 uses it; see mailact.py.

Act 4, the global queue. Two organizations share an `Engine`, and several things go wrong; see engineact.py.
Then a goal of five steps is rolled back and takes another way; see goalact.py.
Then three agents on one coordinator are killed, and get their answers when they are back; see agents.py.

Act 5, the audit stream. All events of these acts go to one stream. The demo prints the request of the stopped
agent from its first event to its last, verifies the files, and checks the history for messages that were
lost, duplicated or out of order.

Act 6, the pipeline. Spark loads the stream into tables, and a report is made; see pipelineact.py.

All files stay in build/demo until the next demo. The last lines that it prints are commands to explore them.
"""

import argparse
import json
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agents import main as run_agents
from engineact import act_engine, store_url
from goalact import act_goals
from mailact import act_mail
from pipelineact import act_pipeline

from postroom import Audit, Bus, Queue, Tasks
from postroom.client import Task, TaskClient

JOBS = 24
WORKERS = ("ada", "ben", "cho")
VICTIM = "ben"
KILL_AFTER_JOBS = 3
PATIENCE_S = 1.0  # the coordinator asks another worker when an answer takes longer
TIME_LIMIT_S = 600.0
ROTATE_BYTES = 8_000  # small, so that the tour shows rotation too

TASKS = 24
ZOMBIE = "cho"
SUCCESSOR = "ada"
LEASE_S = 1.5  # short, so that the demo does not wait for long
WORK_S = 0.15

BIN = Path(sys.executable).parent
FOLDER = Path(__file__).resolve().parents[1] / "build" / "demo"


class Post:
    """A process's bus, queue and ledger. The ledger is written only after a call has returned."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.bus = Bus(folder / "bus.yaml", rotate_bytes=ROTATE_BYTES)
        self.queue = Queue(folder / "queue")
        self._ledger = os.open(folder / f"{name}.ledger", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def tell(self, kind: str, task: str, body: str, parents: tuple[str, ...] = ()) -> str:
        """Append to the bus."""
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
    """A worker: take jobs from the queue, do them, answer."""
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
    """The coordinator: send every job, and send it to another worker when no answer comes."""
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
    """Follow the bus across its rotations, print its messages, and kill one worker meanwhile."""
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
            print(f"  {'':15}  {'':12} kill -9          {VICTIM} is dead, in the middle of its job")
        if message.type == "finished":
            return
    sys.exit("the demo did not finish in time")


def ledger_entries(folder: Path) -> Iterator[tuple[str, str]]:
    """Everything that was acknowledged to any process, as (log, id)."""
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
    """Print a command and run it."""
    shown = [word.replace(f"{folder}{os.sep}", "") for word in command]
    print(f"\n$ {' '.join(shown)}", flush=True)
    subprocess.run([BIN / command[0], *command[1:]], check=True)


def act_one(folder: Path) -> bool:
    """Bus and Queue, without a server."""
    print("Act 1: a coordinator, three workers, one queue, one bus, no server\n")
    with Queue(folder / "queue") as queue:
        for name in ("coordinator", *WORKERS):
            queue.register(name)  # from now on a message to an unknown name is reported
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
    print(
        "\nThe proof: the ids acknowledged to each process, the killed worker included, against the files\n"
    )
    return prove(folder)


# ---- act 2 ---------------------------------------------------------------------------------------


def be_agent(name: str) -> None:
    """An agent: square numbers until SIGTERM. It does not check whether its lease was lost."""

    def square(task: Task) -> dict[str, int]:
        time.sleep(WORK_S)  # the work itself
        return {"square": task.payload["number"] ** 2}

    url, token = os.environ["HARNESS_URL"], os.environ["POSTROOM_TOKEN"]
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    with TaskClient(url, agent="squares", token=token, worker=name) as client:
        client.work(square, lease_s=LEASE_S)


class Harness:
    """The harness and its agents as processes, each with a log file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = folder / "harness"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        add: list[Any] = [BIN / "postroom", "tasks", "agent", "add", "squares", "--data", self.data]
        token = json.loads(subprocess.run(add, check=True, capture_output=True).stdout)["token"]
        self._environ = {**os.environ, "POSTROOM_TOKEN": token}

    def serve(self) -> None:
        """Start the harness. Executing a decision appends it to a file."""
        effects = shlex.join(["tee", "-a", str(self.folder / "effects.jsonl")])
        serve = [BIN / "postroom", "tasks", "serve", "--data", self.data, "--port", "0", "--execute", effects]
        server = self.start("harness", serve, stdout=subprocess.PIPE)
        assert server.stdout is not None
        self._environ["HARNESS_URL"] = json.loads(server.stdout.readline())["url"]

    def start(self, name: str, command: list[Any], **options: Any) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(command, env=self._environ, stderr=log, **options)
        return self.processes[name]

    def start_agent(self, name: str) -> None:
        self.start(name, [sys.executable, __file__, "--role", "agent", "--name", name])

    def end(self) -> dict[str, int]:
        """Stop all processes, the harness last; returns their exit codes."""
        for process in reversed(self.processes.values()):
            process.send_signal(signal.SIGCONT)
            process.terminate()
            process.communicate(timeout=TIME_LIMIT_S)
        return {name: process.returncode for name, process in self.processes.items()}


def say(who: str, what: str, more: str = "") -> None:
    print(f"  {datetime.now(UTC):%H:%M:%S.%f}  {who:<12} {what:<16} {more}", flush=True)


def held_by(tasks: Tasks, name: str) -> str | None:
    """The task that an agent holds now."""
    lines = tasks.find(agent="squares", state="PROCESSING")
    return next((line.task_id for line in lines if tasks.get(line.task_id).worker == name), None)


def until_holding(tasks: Tasks, harness: Harness, name: str, number: int) -> str:
    """Send a signal to an agent while it holds a task; returns that task."""
    while True:
        until(lambda: held_by(tasks, name) is not None, f"a task for {name}")
        harness.processes[name].send_signal(number)
        time.sleep(0.02)  # requests that were in flight arrive
        held = held_by(tasks, name)
        if held is not None or number == signal.SIGKILL:
            return held or "nothing"
        harness.processes[name].send_signal(signal.SIGCONT)  # the task was finished just before


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIME_LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            sys.exit(f"the demo timed out while it waited for {what}")
        time.sleep(0.01)


def act_two(folder: Path) -> bool:
    """Tasks: a harness, three agents, one of them killed and one stopped."""
    print("\nAct 2: a harness with a task queue, three agents, one killed, one stopped\n")
    harness = Harness(folder)
    with Tasks.open(f"sqlite:///{harness.data / 'queue.db'}") as tasks:
        acknowledged = [tasks.enqueue(agent="squares", payload={"number": n}) for n in range(1, TASKS + 1)]
        say("source", "enqueued", f"{TASKS} tasks, before any agent runs")
        try:
            harness.serve()
            # One after the other: on a busy machine the first to start could take every task.
            harness.start_agent(VICTIM)
            killed = until_holding(tasks, harness, VICTIM, signal.SIGKILL)
            say(VICTIM, "kill -9", f"while it held {killed}")
            harness.start_agent(ZOMBIE)
            stopped = until_holding(tasks, harness, ZOMBIE, signal.SIGSTOP)
            say(ZOMBIE, "SIGSTOP", f"while it held {stopped}: no heartbeats from now on")
            harness.start_agent(SUCCESSOR)
            until(lambda: tasks.get(stopped).status in ("completed", "done"), "the stopped agent's task")
            say(
                tasks.get(stopped).worker,
                "took over",
                f"{stopped} after its lease of {LEASE_S:g} s, and did it",
            )
            harness.processes[ZOMBIE].send_signal(signal.SIGCONT)
            say(ZOMBIE, "SIGCONT", "it continues as if nothing had happened")
            until(lambda: tasks.status().totals.get("done", 0) >= TASKS, "all tasks")
            until(lambda: refusals(folder) > 0, "the refusal")
            say("harness", "all done", f"{TASKS} decisions executed")
        finally:
            codes = harness.end()
        say("all", "ended", ", ".join(f"{name} {code}" for name, code in codes.items()))
        show(folder, "postroom", "tasks", "status", "--data", str(harness.data))
        print("\nThe proof: the acknowledged tasks, against the store and the executed decisions\n")
        return prove_tasks(tasks, acknowledged, folder, codes)


def refusals(folder: Path) -> int:
    """How often a call of the stopped agent was refused because its task had another holder."""
    return (folder / f"{ZOMBIE}.log").read_text().count(" went to ")


def prove_tasks(tasks: Tasks, acknowledged: list[str], folder: Path, codes: dict[str, int]) -> bool:
    """Every acknowledged task is done, was completed once with the right result, and executed once."""
    infos = [tasks.get(task_id) for task_id in acknowledged]
    completions = Counter(
        event.message_id for event in tasks.events(limit=100_000) if event.kind == "execution_completed"
    )
    lines = (folder / "effects.jsonl").read_text().splitlines()
    effects = Counter(json.loads(line)["task_id"] for line in lines)
    lost = sum(info.status != "done" for info in infos)
    doubled = sum(completions[task_id] != 1 or effects[task_id] != 1 for task_id in acknowledged)
    wrong = sum(info.result != {"square": info.payload["number"] ** 2} for info in infos)
    deliveries = Counter(info.attempt for info in infos)
    print(f"  tasks  acknowledged {len(acknowledged):>4}   done   {len(infos) - lost:>4}   "
          f"lost {lost}   doubled {doubled}   wrong {wrong}")  # fmt: skip
    delivered = ", ".join(f"{count} tasks {n} times" for n, count in sorted(deliveries.items()))
    print(f"  delivered: {delivered}")
    print(f"  late calls of the stopped agent that were refused: {refusals(folder)}")
    clean = {name: code for name, code in codes.items() if name != VICTIM}
    return not (lost or doubled or wrong or any(clean.values())) and refusals(folder) > 0


# ---- act 5 ---------------------------------------------------------------------------------------


def act_audit(folder: Path) -> bool:
    """The audit stream of the acts before."""
    print("\nAct 5: all events in one stream, which can be searched and verified\n")
    stream, store = str(folder / "audit"), f"sqlite:///{folder / 'harness' / 'queue.db'}"
    show(
        folder, "postroom", "audit", "ship", "--once", "--to", stream, "--store", store,
        "--store", store_url(folder),
        "--queue", str(folder / "queue"), "--bus", str(folder / "bus.yaml"), "--mail", str(folder / "mail"),
    )  # fmt: skip
    audit = Audit(stream)
    retried = next(event.message_id for event in audit.query(kind="lease_lapsed", contract="tasks"))
    print(f"\nThe request of {retried}, whose first holder did not finish it\n")
    for span in audit.trace(retried):
        indent = "  " * (span.depth + 1)
        print(f"{indent}{span.message_id}  {span.queue}, {span.attempts} deliveries, {span.outcome}")
        for event in span.events:
            after_ms = (event.ts_us - span.start_us) / 1000
            print(f"{indent}  {after_ms:9.1f} ms  {event.kind:<20} {event.worker_id}")
    show(folder, "postroom", "audit", "verify", stream)
    show(folder, "postroom", "verify", stream, "--store", store)
    newest = sum(len(range(first, last + 1)) for first, last in sources(audit).values())
    print(
        f"\n  events in the stream {sum(1 for _ in audit.query())}, numbers given by their sources {newest}"
    )
    return sum(1 for _ in audit.query()) == newest


def sources(audit: Audit) -> dict[str, tuple[int, int]]:
    """The first and the last number of each source."""
    spans: dict[str, tuple[int, int]] = {}
    for event in audit.query():
        first, last = spans.get(event.source, (event.seq, event.seq))
        spans[event.source] = min(first, event.seq), max(last, event.seq)
    return spans


def main() -> None:
    """Run the tour, or one of its roles."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--folder", type=Path, help=f"where its files go (default: {FOLDER})")
    parser.add_argument("--role", choices=("coordinator", *WORKERS, "agent"), help=argparse.SUPPRESS)
    parser.add_argument("--name", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role == "coordinator":
        coordinate(arguments.folder)
    elif arguments.role == "agent":
        be_agent(arguments.name)
    elif arguments.role:
        work(arguments.folder, arguments.role)
    else:
        tour(arguments.folder)


def tour(given: Path | None) -> None:
    """All acts, in one folder."""
    folder = FOLDER if given is None else given.absolute()
    if given is None:
        shutil.rmtree(folder, ignore_errors=True)  # left by the previous demo
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        sys.exit(f"{folder} is not empty: the demo needs an empty folder")
    fine = act_one(folder)
    fine = act_two(folder) and fine
    fine = act_mail(folder, say) and fine
    fine = act_engine(folder, say) and fine
    fine = act_goals(folder, say) and fine
    print("\nThree agents on one coordinator:", flush=True)
    fine = run_agents(folder / "agents") and fine
    fine = act_audit(folder) and fine
    events = sum(1 for _ in Audit(folder / "audit").query())
    fine = act_pipeline(folder, show, folder / "report.html", events) and fine
    show_what_stays(folder)
    print(f"\n{'Nothing acknowledged was lost.' if fine else 'SOMETHING IS WRONG.'}")
    sys.exit(0 if fine else 1)


def show_what_stays(folder: Path) -> None:
    """Commands that work in any folder, also without an activated environment."""
    stream, tables = folder / "audit", folder / "tables"
    print(f"\nEverything stays in {folder}: the audit stream in audit, the tables in tables. Try next:")
    for words in (
        ("audit", "tail", stream, "-n", "5"),
        ("audit", "query", stream, "--kind", "lease_lapsed"),
        ("pipeline", "status", "--tables", tables, "--events", stream),
        ("pipeline", "report", "--tables", tables, "--out", folder / "report.html"),
        ("bus", "tail", "--bus", folder / "bus.yaml", "-n", "3"),
        ("queue", "status", "--root", folder / "queue"),
        ("tasks", "status", "--data", folder / "harness"),
    ):
        print(f"  {shlex.join(map(str, (BIN / 'postroom', *words)))}")


if __name__ == "__main__":
    main()
