"""Messages of the past, submitted again: in order, once, and only with what they really said."""

import contextlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom import Tasks
from postroom.calls.fields import KEY_CHARS_MAX
from postroom.contracts.feeds import set_outbox
from postroom.errors import InvalidMessage, InvalidSetting, Rejected
from postroom.pipeline.delta.tables import Tables
from postroom.pipeline.replay import ReplaySelection, replay
from postroom.pipeline.silver import tables as silver
from postroom.pipeline.silver.events import events as silver_events
from postroom.pipeline.submission import ReplayMessage, Submitter, is_fit
from postroom.server.folder.shipping import Sources, opened
from postroom.settings import AuditSettings
from postroom.system.crypto.key_file import add_key
from tests.spark.commands import Commands
from tests.spark.stories import events_in

MESSAGES = 30


class Past:
    """A store, and the tables of its stream: once with encrypted payloads, once with redacted ones."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.store = f"sqlite:///{folder}/queue.db"
        self.keys = folder / "keys"
        add_key(self.keys, "one")
        with Tasks.open(self.store) as tasks:
            for number in range(MESSAGES):
                payload = {"n": number, "to": "ada@example.com"}
                tasks.enqueue(agent=f"agent-{number % 3}", payload=payload, type="issue")
        self.sealed = self._tables(spark, folder / "sealed", AuditSettings(key_file=self.keys))
        self.redacted = self._tables(spark, folder / "redacted", AuditSettings())

    def _tables(self, spark: SparkSession, folder: Path, settings: AuditSettings) -> Tables:
        with opened(folder / "audit", Sources(stores=(self.store,)), settings) as shipping:
            shipping.once()
        with Tasks.open(self.store) as tasks:
            set_outbox(tasks.store, None)  # one store has one stream, and this one is given up
        lines = events_in(spark, folder / "audit")
        tables = Tables(folder / "tables")
        tables.replace("silver_events", silver_events(lines, {}), partition_by=("day",))
        tables.replace("silver_messages", silver.messages(lines), partition_by=("day",))
        return tables


@pytest.fixture(scope="module")
def past(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Past:
    return Past(spark, tmp_path_factory.mktemp("past"))


def said_in(url: str, agent: str = "agent-1") -> list[int]:
    """What an agent would be given, in the order of its queue."""
    with Tasks.open(url) as tasks:
        return [task.payload["n"] for task in tasks.claim(agent=agent, limit=100)]


def test_replay_reads_encrypted_payloads_in_order(past: Past, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/sandbox.db"
    wanted = ReplaySelection(where="queue = 'agent-1'", to=url, key_file=past.keys)
    found = replay(past.sealed, wanted)
    assert (found.selected, found.submitted, found.known, found.refused) == (10, 10, 0, 0)
    again = replay(past.sealed, wanted)
    assert (again.replay_id, again.submitted, again.known) == (found.replay_id, 0, 10)
    assert said_in(url) == list(range(1, MESSAGES, 3))


def test_replay_reads_payloads_from_the_store(past: Past, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/sandbox.db"
    wanted = ReplaySelection(where="type = 'issue'", to=url, store=past.store, rate=500.0)
    assert replay(past.redacted, wanted).submitted == MESSAGES
    with Tasks.open(url) as tasks:
        first = tasks.get(tasks.find(agent="agent-0")[0].task_id)
    assert first.payload == {"n": 0, "to": "ada@example.com"}
    assert first.type == "issue"


def test_a_redacted_payload_is_refused_and_counted(past: Past, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/sandbox.db"
    found = replay(past.redacted, ReplaySelection(where="true", to=url, key_file=past.keys))
    assert (found.selected, found.submitted, found.refused) == (MESSAGES, 0, MESSAGES)
    assert len(found.refused_samples) == 5
    other = tmp_path / "other-keys"
    add_key(other, "one")
    wrong_key = replay(past.sealed, ReplaySelection(where="true", to=url, key_file=other))
    assert (wrong_key.submitted, wrong_key.refused) == (0, MESSAGES)


def with_column(spark: SparkSession, past: Past, folder: Path, name: str, value: Column) -> Tables:
    """The messages of the past, of which one thing is told differently."""
    tables = Tables(folder / "tables")
    tables.replace("silver_messages", past.redacted.read(spark, "silver_messages").withColumn(name, value))
    return tables


def test_an_unfit_message_is_refused_and_the_others_are_submitted(
    spark: SparkSession, past: Past, commands: Commands, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/sandbox.db"
    rows = past.redacted.read(spark, "silver_messages").orderBy("created_us", "message_id").collect()
    nowhere, nameless = rows[3].message_id, rows[5].message_id
    this = F.col("message_id")
    queue = F.when(this == nameless, "no name").when(this != nowhere, F.col("queue"))
    tables = with_column(spark, past, tmp_path, "queue", queue)
    wanted = ReplaySelection(where="true", to=url, store=past.store)
    found = replay(tables, wanted)
    assert (found.selected, found.submitted) == (MESSAGES, MESSAGES - 2)
    assert (found.refused, found.unfit) == (2, 2)
    assert found.refused_samples == [nowhere, nameless]
    words = ("--tables", tables.folder, "--where", "true", "--store", past.store, "--to", url)
    again = commands("replay", *words, "--json")
    assert again.code == 1
    told = json.loads(again.stdout)
    assert (told["submitted"], told["known"], told["unfit"]) == (0, MESSAGES - 2, 2)


@pytest.mark.parametrize(
    ("message_id", "queue", "fit"),
    [("m1", "ada", True), ("", "ada", False), ("m" * KEY_CHARS_MAX, "ada", False), ("m1", "a/b", False)],
)
def test_what_is_fit_is_what_the_submitter_takes(message_id: str, queue: str, fit: bool) -> None:
    assert is_fit("r1", message_id, queue) == fit
    with Submitter("memory://", "r1") as submitter:
        refused = contextlib.nullcontext() if fit else pytest.raises(Rejected)
        with refused:
            submitter.submit([ReplayMessage(message_id, queue, "1")])
        assert submitter.new == fit


def test_messages_of_every_priority_can_be_claimed_again(
    spark: SparkSession, past: Past, tmp_path: Path
) -> None:
    """Tasks have no priorities: a message that kept another one would never be claimed."""
    url = f"sqlite:///{tmp_path}/sandbox.db"
    tables = with_column(spark, past, tmp_path, "priority", F.pmod(F.hash("message_id"), F.lit(4)))
    replay(tables, ReplaySelection(where="queue = 'agent-1'", to=url, store=past.store))
    assert said_in(url) == list(range(1, MESSAGES, 3))


def test_a_dry_run_of_the_command_submits_nothing(past: Past, commands: Commands, tmp_path: Path) -> None:
    where = ("--where", "type = 'issue'", "--since", "2020-01-01T00:00:00Z", "--store", past.store)
    words = ("--tables", past.redacted.folder, *where, "--to", f"sqlite:///{tmp_path}/sandbox.db")
    done = commands("replay", *words, "--dry-run", "--json")
    assert done.code == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["selected"], told["submitted"], told["refused"]) == (MESSAGES, MESSAGES, 0)
    assert not (tmp_path / "sandbox.db").exists()


def test_times_bound_what_is_chosen(spark: SparkSession, past: Past, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/sandbox.db"
    times = past.redacted.read(spark, "silver_messages").orderBy("created_us").select("created_us").collect()
    since, until = times[10].created_us, times[20].created_us
    expected = sum(since <= row.created_us < until for row in times)
    wanted = ReplaySelection(
        where="true", to=url, store=past.store, since_us=since, until_us=until, dry_run=True
    )
    assert replay(past.redacted, wanted).selected == expected


def test_wrong_requests_are_refused_with_a_one_line_error(past: Past, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/sandbox.db"
    with pytest.raises(InvalidMessage, match=r"is not a condition on silver_messages: \w"):
        replay(past.redacted, ReplaySelection(where="nobody = 1", to=url, store=past.store))
    with pytest.raises(InvalidMessage, match=r"is not a condition on silver_messages: \w"):
        replay(past.redacted, ReplaySelection(where="type = ", to=url, store=past.store))
    for condition in (
        "",
        "true UNION SELECT * FROM silver_messages",
        "true; SELECT 1",
        "true) OR (true",
        "type IN (SELECT content FROM read_text('/etc/fstab'))",
        "type IN (FROM '/etc/fstab')",
        "CAST(type AS int) = 1",
    ):
        with pytest.raises(InvalidMessage, match=r"is not a condition on silver_messages: \w"):
            replay(past.redacted, ReplaySelection(where=condition, to=url, store=past.store))
    with pytest.raises(InvalidSetting, match="the source of the payloads is missing"):
        replay(past.redacted, ReplaySelection(where="true", to=url))
    with pytest.raises(InvalidSetting, match="there is no store"):
        replay(
            past.redacted,
            ReplaySelection(where="true", to=url, store=f"sqlite:///{tmp_path}/nowhere.db"),
        )


SUBMIT = """
import sys
from postroom.pipeline.submission import ReplayMessage, Submitter
with Submitter(sys.argv[1], "r1") as submitter:
    for number in range(400):
        submitter.submit([ReplayMessage(f"m{number}", "ada", str(number))])
        print(number, flush=True)
"""


def test_a_killed_replay_that_is_run_again_submits_nothing_twice(tmp_path: Path) -> None:
    """Of the submitter, where a kill matters: selecting changes nothing."""
    url = f"sqlite:///{tmp_path}/sandbox.db"
    with subprocess.Popen([sys.executable, "-c", SUBMIT, url], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        for _ in range(50):
            child.stdout.readline()
        child.send_signal(signal.SIGKILL)
    subprocess.run([sys.executable, "-c", SUBMIT, url], check=True, stdout=subprocess.DEVNULL)
    with Tasks.open(url) as tasks:
        said = [task.payload for task in tasks.claim(agent="ada", limit=1_000)]
    assert said == list(range(400))
