"""Every silver and gold table beside the oracle."""

from pathlib import Path

from postroom.pipeline.delta.tables import Tables
from postroom.pipeline.gold.tables import GOLD
from postroom.pipeline.silver.tables import SILVER
from tests.spark.oracle import Rows, expected, oracle, stored
from tests.spark.rows.test_gold import ORACLE, expected_gold
from tests.spark.rows.test_patterns import TEMPLATE_COLUMNS, expected_patterns, expected_templates


def differing(tables: Tables, folder: Path) -> list[str]:
    """The silver and gold tables whose rows are not those of the oracle over a folder of segments."""
    derived = [name for name in tables.names() if name.startswith(("silver_", "gold_"))]
    return [name for name in derived if _rows(tables, name, folder) != _expected(name, folder)]


def _rows(tables: Tables, name: str, folder: Path) -> Rows:
    if name == "gold_dlq_templates":
        return stored(tables, name, TEMPLATE_COLUMNS)
    if name in GOLD:
        return stored(tables, name)
    columns, _ = expected(oracle(folder), name.removeprefix("silver_"))
    return stored(tables, name, columns)


def _expected(name: str, folder: Path) -> Rows:
    if name in ORACLE:
        return expected_gold(folder, name)
    if name == "gold_dlq_templates":
        return expected_templates(folder)
    if name == "gold_dlq_patterns":
        return expected_patterns(folder)
    assert name in SILVER, f"{name} has no oracle"
    _, rows = expected(oracle(folder), name.removeprefix("silver_"))
    return rows
