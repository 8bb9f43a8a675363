"""Spark's event logs of the jobs on a folder of tables, for its history server.

Rule: only the newest logs are kept. They are deleted before a job starts, so that a killed job needs no
cleaning up.
"""

import shutil
from pathlib import Path
from typing import Final

FOLDER: Final = "_spark_events"  # below the tables, which ignore names that begin with `_`
EVENT_LOGS_MAX: Final = 20  # of earlier jobs that are kept
SETTINGS: Final = {
    "spark.eventLog.enabled": "true",
    "spark.eventLog.compress": "true",
    "spark.eventLog.rolling.enabled": "false",  # a job is short, and one file is easily deleted
}


def event_log_settings(tables: Path) -> dict[str, str]:
    """The settings of Spark that write the event log of a job next to its tables. Deletes old logs."""
    folder = tables / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    logs = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    for path in logs[EVENT_LOGS_MAX:]:
        _delete(path)
    return SETTINGS | {"spark.eventLog.dir": folder.as_uri()}


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
