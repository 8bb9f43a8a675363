"""The gold tables: aggregates of silver for operators and agents. Every module here is found by itself.

A module declares tables in `TABLES`; `docs/howto/add-a-table.md` shows one.

Rule 1: a table follows a change without reading the rest of history: it adds sums, or rebuilds the hours that
        changed. A table that spans days is computed from a small table by day.
Rule 2: percentiles are exact, and do not depend on partitioning: the value at the nearest rank of the sorted
        list. A histogram of fixed buckets next to them can be summed over any groups.
Rule 3: `hour_us` is the start of a UTC hour. A message counts in the hour of its creation, an event in the
        hour in which it happened.
Rule 4: a store records the type and organization of a message once, when it is created. Tables that group by
        these read them from `silver_messages`, and are rebuilt if a known message gets others.
"""

from graphlib import TopologicalSorter
from importlib import import_module
from pkgutil import iter_modules
from typing import Final

from postroom.pipeline.follow.refresh import Table

FORM: Final = 6
"""The version of the columns, partitions and meaning of the tables. A table of another form is rebuilt."""


def _found() -> dict[str, Table]:
    """The tables of all modules, each after its inputs."""
    modules = (import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__))
    tables: dict[str, Table] = {
        name: table._replace(form=FORM) for module in modules for name, table in module.TABLES.items()
    }
    order = TopologicalSorter({name: table.inputs for name, table in tables.items()}).static_order()
    return {name: tables[name] for name in order if name in tables}


GOLD: Final = _found()
