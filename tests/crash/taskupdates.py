"""Updates of a task queue that are crashed at each system call, and the rules that must hold afterwards."""

from pathlib import Path

from postroom import StaleLease, Tasks
from postroom.message import Durability
from postroom.stores.base import Listing
from tests.crash.ledger import Tally, compare, token_of
from tests.crash.taskprograms import open_tasks, task_of
from tests.crash.tasks import check_store, delivery_of, ids_of
from tests.crash.updates import OLD, Attempt, Expected, Update, new_tokens

AGENT = "coder"
OLD_TASKS = 3
LEASED = 2


def _open(folder: Path, durability: Durability) -> Tasks:
    return open_tasks(folder / "deep", durability=durability)


def _open_checkpointing(folder: Path, durability: Durability) -> Tasks:
    """Every commit moves the WAL into the database."""
    return open_tasks(folder / "deep", durability=durability, wal_pages=1)


def _prepare_nothing(folder: Path) -> Expected:
    return {}


def _prepare_waiting(folder: Path) -> Expected:
    with _open(folder, "os") as tasks:
        tokens = [token_of(OLD, number, 100) for number in range(OLD_TASKS)]
        return {AGENT: tasks.enqueue_many(task_of(token, AGENT) for token in tokens)}


def _prepare_leased(folder: Path) -> Expected:
    expected = _prepare_waiting(folder)
    with _open(folder, "os") as tasks:
        tasks.claim(agent=AGENT, limit=LEASED)
    return expected


def _prepare_completed(folder: Path) -> Expected:
    expected = _prepare_leased(folder)
    with _open(folder, "os") as tasks:
        _complete(tasks, 0)
    return expected


# ---- what is done ----------------------------------------------------------------------------------


def _enqueue(tasks: Tasks, attempt: int) -> list[str]:
    (token,) = new_tokens(attempt)
    return [token, tasks.enqueue(**task_of(token, AGENT))]


def _enqueue_many(tasks: Tasks, attempt: int) -> list[str]:
    tokens = new_tokens(attempt, count=5, size=2_000)
    ids = tasks.enqueue_many(task_of(token, AGENT) for token in tokens)
    return [word for pair in zip(tokens, ids, strict=True) for word in pair]


def _claim(tasks: Tasks, attempt: int) -> list[str]:
    return [word for task in tasks.claim(agent=AGENT, limit=2) for word in (task.task_id, str(task.lease))]


def _complete(tasks: Tasks, attempt: int) -> list[str]:
    """Uses both existing leases; a call of the first try may be repeated."""
    held = [
        (record.message_id, record.lease)
        for record in tasks.store.find(Listing(AGENT, "PROCESSING", limit=LEASED))
    ]
    tasks.complete_many((task_id, lease, {"under": lease}) for task_id, lease in held)
    return [word for task_id, lease in held for word in (task_id, str(lease))]


def _act_on_results(tasks: Tasks, attempt: int) -> list[str]:
    """Turn a result into a decision, claim it, and execute it."""
    [first, *_] = tasks.find(agent=AGENT, state="COMPLETED")
    tasks.open_decision(first.task_id)
    for decision in tasks.claim(agent="harness.decisions"):
        tasks.settle(decision)
    return [first.task_id]


# ---- what must hold --------------------------------------------------------------------------------


def _pairs(attempts: list[Attempt]) -> dict[str, str]:
    words = [word for attempt in attempts if attempt.outcome == "ok" for word in attempt.words]
    return dict(zip(words[::2], words[1::2], strict=True))


def _judge_enqueued(folder: Path, expected: Expected, attempts: list[Attempt], tally: Tally) -> None:
    acknowledged = _pairs(attempts)
    old = expected.get(AGENT, [])
    with _open(folder, "os") as tasks:
        infos = [tasks.get(task_id) for task_id in ids_of(tasks, AGENT)]
        tally.acknowledged += len(acknowledged) + len(old)
        compare(acknowledged, map(delivery_of, infos), tally)
        tally.lost += len(set(old) - {info.task_id for info in infos})
        tally.count("unacknowledged_but_whole", -len(old))
        new = [info.payload["token"] for info in infos][len(old) :]
        for attempt in attempts or [Attempt(0, "died", [])]:
            writer = f"new{attempt.number}."
            whole = 5 if len(acknowledged) > 1 or any(".4." in token for token in new) else 1
            if sum(token.startswith(writer) for token in new) not in (0, whole):
                tally.breaks(f"of several tasks, only {new} were kept")
            if attempt.outcome == "void" and any(token.startswith(writer) for token in new):
                tally.breaks("an error said that nothing was kept, but it was")
        _judge_going_on(tasks, folder, [info.task_id for info in infos], tally)


def _judge_going_on(tasks: Tasks, folder: Path, waiting: list[str], tally: Tally) -> None:
    """The next task is queued after all waiting ones, and all are claimed in order."""
    check_store(tasks, folder / "deep", tally)
    after = tasks.enqueue(**task_of(token_of("after", 0, 50), AGENT))
    given = [task.task_id for task in tasks.claim(agent=AGENT, limit=100)]
    if given != [*waiting, after]:
        tally.breaks(f"{given} were handed out, and {[*waiting, after]} waited")


def _judge_claimed(folder: Path, expected: Expected, attempts: list[Attempt], tally: Tally) -> None:
    """Claimed tasks are leased under their token; a killed claim leased both or none."""
    claims = _pairs(attempts)
    with _open(folder, "os") as tasks:
        tally.acknowledged += len(expected[AGENT])
        infos = [tasks.get(task_id) for task_id in expected[AGENT]]
        leased = {
            record.message_id: str(record.lease) for record in tasks.store.find(Listing(AGENT, "PROCESSING"))
        }
        for task_id, lease in claims.items():
            tally.lost += leased.get(task_id) != lease
        if len(leased) not in (0, 2) and len(attempts) <= 1:
            tally.breaks(f"a claim was cut in half: {leased}")
        waiting = [info.task_id for info in infos if info.state == "QUEUED"]
        if sorted([*leased, *waiting]) != sorted(expected[AGENT]):
            tally.breaks(f"leased {leased} and waiting {waiting} are not all of {expected[AGENT]}")
        _judge_going_on(tasks, folder, waiting, tally)


def _judge_completed(folder: Path, expected: Expected, attempts: list[Attempt], tally: Tally) -> None:
    """An acknowledged result is stored, both or none, and no other lease can change it."""
    done = _pairs(attempts)
    with _open(folder, "os") as tasks:
        infos = {task_id: tasks.get(task_id) for task_id in expected[AGENT]}
        tally.acknowledged += len(done)
        for task_id, lease in done.items():
            tally.lost += infos[task_id].result != {"under": int(lease)}
        completed = [info.task_id for info in infos.values() if info.state == "COMPLETED"]
        if len(completed) not in (0, LEASED):
            tally.breaks(f"of two completions in one commit, {completed} were kept")
        for task_id in completed:
            _judge_fenced(tasks, task_id, tally)
        waiting = [info.task_id for info in infos.values() if info.state == "QUEUED"]
        _judge_going_on(tasks, folder, waiting, tally)


def _judge_fenced(tasks: Tasks, task_id: str, tally: Tally) -> None:
    before = tasks.get(task_id).result
    try:
        tasks.complete(task_id, before["under"] + 1_000, "stale")
    except StaleLease:
        pass
    else:
        tally.breaks("a stale completion was accepted")
    if tasks.get(task_id).result != before:
        tally.breaks("a stale completion changed a result")


def _judge_acted_on(folder: Path, expected: Expected, attempts: list[Attempt], tally: Tally) -> None:
    """A settled result is done; any other is left for the next harness."""
    with _open(folder, "os") as tasks:
        info = tasks.get(expected[AGENT][0])
        said = any(attempt.outcome == "ok" for attempt in attempts)
        tally.acknowledged += said
        tally.lost += said and info.state != "DONE"
        decisions = ids_of(tasks, "harness.decisions")
        if info.state not in ("COMPLETED", "EXECUTING", "DONE"):
            tally.breaks(f"a completed task is {info.state}")
        if len(decisions) != (info.state != "COMPLETED"):
            tally.breaks(f"{info.state} with the decisions {decisions}")
        if info.state == "DONE" and tasks.get(decisions[0]).state != "COMPLETED":
            tally.breaks("a task is done, and its decision is not")
        _judge_going_on(tasks, folder, expected[AGENT][LEASED:], tally)


TASK_UPDATES = [
    Update(name=f"tasks-{name}", prepare=prepare, open=opened, act=act, judge=judge, repeats=name != "settle")
    for name, prepare, opened, act, judge in (
        ("enqueue", _prepare_waiting, _open, _enqueue, _judge_enqueued),
        ("enqueue-first", _prepare_nothing, _open, _enqueue, _judge_enqueued),
        ("enqueue-many", _prepare_waiting, _open, _enqueue_many, _judge_enqueued),
        ("claim", _prepare_waiting, _open, _claim, _judge_claimed),
        ("complete", _prepare_leased, _open, _complete, _judge_completed),
        ("complete-checkpoint", _prepare_leased, _open_checkpointing, _complete, _judge_completed),
        ("settle", _prepare_completed, _open, _act_on_results, _judge_acted_on),
    )
]
