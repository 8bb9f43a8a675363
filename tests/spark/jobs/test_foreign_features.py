"""Every command refuses a table of another engine whose rows it would get wrong, and names the feature."""

import json
import shutil
from pathlib import Path

import pytest

from tests.spark.commands import Commands
from tests.spark.conftest import TablesOf
from tests.unit.test_pipeline_hostile_tables import FEATURES

READERS = {
    "sql": ["SELECT count(*) FROM silver_messages"],
    "check": [],
    "expect": [],
    "report": ["--out", "{folder}/report.html"],
    "status": [],
    "tables": ["--compact", "--vacuum"],
    "run": ["--events", "{events}"],
    "backfill": [],
    "retain": ["--keep-days", "1"],
    "replay": [
        "--where",
        "true",
        "--to",
        "sqlite:///{folder}/to.db",
        "--store",
        "sqlite:///{folder}/from.db",
    ],
}
"""The commands that read `silver_messages` or `silver_events`, with what they need."""


def mapped(schema: str) -> str:
    """A schema whose columns have the physical names that they had."""
    found = json.loads(schema)
    for number, field in enumerate(found["fields"], 1):
        field["metadata"] = {
            "delta.columnMapping.id": number,
            "delta.columnMapping.physicalName": field["name"],
        }
    return json.dumps(found)


@pytest.mark.parametrize(("feature", "protocol", "settings"), FEATURES)
def test_every_command_refuses_a_feature_that_changes_rows(
    commands: Commands,
    tables_of: TablesOf,
    tmp_path: Path,
    feature: str,
    protocol: dict[str, object],
    settings: dict[str, str],
) -> None:
    events, made = tables_of(faults=True)
    shutil.copytree(made.folder, tmp_path / "tables")
    for name in ("silver_messages", "silver_events"):
        log = tmp_path / "tables" / name / "_delta_log"
        last = max(log.glob("*.json"))
        first = min(log.glob("*.json")).read_text().splitlines()
        [table] = [json.loads(text) for text in first if "metaData" in text]
        table["metaData"]["configuration"] |= settings
        if feature == "columnMapping":
            table["metaData"]["schemaString"] = mapped(table["metaData"]["schemaString"])
        change = [{"protocol": protocol}, table]
        text = "".join(json.dumps(action) + "\n" for action in change)
        (log / f"{int(last.stem) + 1:020}.json").write_text(text)
    for command, options in READERS.items():
        words = [word.format(folder=tmp_path, events=events) for word in options]
        done = commands(command, "--tables", tmp_path / "tables", *words)
        assert done.code != 0, command
        assert f"cannot be read: it uses {feature}" in done.stderr, (command, done.stderr)
