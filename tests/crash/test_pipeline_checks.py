"""The checkers of the pipeline's long runs detect faults. One kill is in tests/spark."""

import json
from collections import Counter
from pathlib import Path
from random import Random

from postroom.pipeline.generator.generate import generate
from postroom.pipeline.ingest.segments import SegmentStream
from tests.crash import pipelinedelivery, pipelinedisk, pipelining
from tests.crash.ledger import Tally
from tests.spark.commands import Done


def test_missing_and_duplicate_rows_are_counted() -> None:
    tally = Tally()
    pipelining.compare({"t": Counter("aab"), "u": Counter("x")}, {"t": Counter("abb")}, tally)
    assert (tally.lost, tally.doubled) == (2, 1)
    assert len(tally.broken) == 2
    assert not tally.ok


def test_missed_and_false_faults_are_counted() -> None:
    planted = [{"rule": "lost", "message_id": "m1"}, {"rule": "lost", "message_id": "m2"}]

    def judged(said: str, *messages: str) -> Tally:
        rows = "".join(json.dumps({"rule": "lost", "message_id": name}) + "\n" for name in messages)
        tally = Tally()
        pipelining.judge(planted, Done(1, rows, said), tally)
        return tally

    assert judged("2 violations in a history: 2 lost", "m1", "m2").ok
    assert judged("2 violations in a history: 2 lost", "m1", "m3").lost == 1
    assert judged("2 violations in a history: 2 lost", "m1", "m3").doubled == 1
    assert judged("1 violations in a history: 1 lost", "m1").broken


def test_a_random_delivery_is_complete() -> None:
    lines = [b"%d" % number for number in range(200)]
    ways = []
    for seed in range(30):
        rng = Random(seed)
        runs = pipelinedelivery.runs(lines, rng)
        segments = [part for arrived in runs for part in pipelinedelivery.dealt(arrived, 3, rng)]
        comes = [line for part in segments for line in part]
        assert set(comes) == set(lines)
        ways.append((len(runs), len(comes) > len(lines), comes != sorted(comes, key=int)))
    assert {runs for runs, *_ in ways} == set(range(1, pipelinedelivery.RUNS_MAX + 1))
    assert all(map(any, zip(*ways, strict=True)))  # some lines were repeated, and out of order


def test_a_large_organization_gets_its_share(tmp_path: Path) -> None:
    generate(tmp_path / "plain", 300, 1)
    for giant in (0, 90):
        lines = pipelining.share_out(tmp_path / "plain", tmp_path / str(giant), giant)
        organizations = Counter(
            json.loads(line)["org_id"]
            for path in (tmp_path / str(giant)).glob("date=*/hour=*/*.jsonl")
            for line in path.read_bytes().splitlines()
        )
        assert organizations.total() == lines
        ready = SegmentStream(tmp_path / str(giant)).pending_after(-1).ready
        assert len(ready) == len(SegmentStream(tmp_path / "plain").segments())
        assert 0.8 < organizations["org-0"] / lines < 1 if giant else organizations["org-0"] / lines < 0.1


def test_an_unexpected_exit_code_or_message_is_noticed() -> None:
    def judged(code: int, said: str) -> bool:
        tally = Tally()
        pipelinedisk.expect(1, Done(code, "", said), tally, "No space left")
        return tally.ok

    assert judged(1, "1 s  bronze\npostroom: No space left on device\n")
    assert not judged(0, "postroom: No space left on device\n")
    assert not judged(1, "postroom: something else\n")
    assert not judged(1, "\tat org.apache.spark\npostroom: No space left on device\n")
    assert not judged(1, "")
