"""Events of breached expectations, in a folder beside the tables.

Rule 1: an event is a file of its own, because nothing can be appended to a file of an object store. Its name
        begins with its time, so that names sort by it.
Rule 2: an event has the form of OpenLineage, and is the one that `expect --lineage` emits.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from postroom.pipeline.delta.storage import Storage

FOLDER: Final = "_breaches"  # below the tables, which ignore names that begin with `_`
BREACH_EVENTS_MAX: Final = 1_000  # newest events that are kept


def keep_breach(storage: Storage, event: Mapping[str, Any]) -> str:
    """Write the event of a breach beside the tables; returns its path. Deletes the oldest events."""
    name = f"{event['eventTime'].replace(':', '')}-{event['run']['runId']}.json"
    path = f"{FOLDER}/{name}"
    storage.write(path, json.dumps(event).encode() + b"\n")
    known = sorted(file.path for file in storage.files(FOLDER, deep=False))
    for oldest in known[:-BREACH_EVENTS_MAX]:
        storage.delete(oldest)
    return path
