"""Flame graphs from the audit stream, without Spark."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from postroom.contracts.audit import Audit
from postroom.errors import InvalidMessage
from postroom.pipeline.report.flames import profile_of, svg_file
from postroom.server.folder.shipping import Sources, opened
from postroom.settings import AuditSettings
from tests.engines import EngineUnderTest
from tests.waiting import HANG_GUARD_S

LIGHT = (
    "import sys; sys.modules.update(jinja2=None, markupsafe=None); from postroom.cli.main import main; main()"
)
"""The command without packages that only an extra brings."""


def worked(tmp_path: Path) -> Path:
    """The stream of a goal: a tool call that ran for 3 s, and its child that waited 2 s and ran for 5 s."""
    world = EngineUnderTest(f"sqlite:///{tmp_path}/queue.db")
    parent = world.submit(goal_id="g1")
    [first] = world.claim()
    world.submit(type="model_call", goal_id="g1", parent_message_id=parent.message_id)
    world.submit(goal_id="other")
    world.clock.advance(2.0)
    [second] = [one for one in world.claim(2) if one.type == "model_call"]
    world.clock.advance(1.0)
    world.complete([first])
    world.clock.advance(4.0)
    world.complete([second])
    world.close()
    sources = Sources(stores=(f"sqlite:///{tmp_path}/queue.db",))
    with opened(tmp_path / "audit", sources, AuditSettings(environment="dev")) as shipping:
        shipping.once()
    return tmp_path / "audit"


@pytest.mark.statement("events-flame")
def test_flame_graph_has_the_time_of_the_messages_of_a_goal_without_spark(tmp_path: Path) -> None:
    audit = Audit(worked(tmp_path))
    spans = audit.goal("g1")
    profile = profile_of("g1", spans)
    assert dict(profile.stacks) == {
        ("tool_call",): 3_000_000,
        ("tool_call", "model_call"): 5_000_000,
        ("tool_call", "model_call", "waiting"): 2_000_000,
    }
    assert profile_of("g1", audit.trace(spans[1].message_id)).stacks == profile.stacks
    with pytest.raises(InvalidMessage, match="no message of the goal 'g2'"):
        audit.goal("g2")


def test_flame_graph_of_messages_that_have_not_ended_is_one_frame() -> None:
    assert svg_file(profile_of("g1", [])).count("<rect") == 1


def test_flame_command_writes_svg_and_speedscope(tmp_path: Path) -> None:
    folder = worked(tmp_path)

    def flame(*words: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-c", LIGHT, "--json", "audit", "flame", str(folder), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=HANG_GUARD_S, check=False)

    for name in ("g1.svg", "g1.json"):
        done = flame("--goal", "g1", "--out", str(tmp_path / name))
        assert json.loads(done.stdout)["total_us"] == 10_000_000, done.stderr
    drawn = ET.parse(tmp_path / "g1.svg").getroot()  # noqa: S314 - a file of ours
    assert drawn.tag == "{http://www.w3.org/2000/svg}svg"
    assert len([one for one in drawn.iter() if one.tag.endswith("}rect")]) == 4
    [profile] = json.loads((tmp_path / "g1.json").read_text())["profiles"]
    assert (profile["type"], profile["endValue"]) == ("sampled", 10_000_000)
    assert flame("--goal", "g1", "--trace", "t", "--out", "x.svg").returncode == 2
    assert "names an .svg or a .json file" in flame("--goal", "g1", "--out", "x.png").stderr
