"""Which SQL is a question. That Spark answers them is shown with the commands."""

import pytest

from postroom.errors import InvalidMessage
from postroom.pipeline.asking import need_question


@pytest.mark.parametrize(
    "query",
    [
        "SELECT 1",
        "  with a AS (SELECT 1) SELECT * FROM a",
        "-- DROP TABLE a\nselect 'DROP TABLE b'",
        "/* DROP\nTABLE a */ (SELECT 1)",
        "((select 1) union (select 2))",
        "SHOW TABLES",
        "describe silver_events",
        "EXPLAIN SELECT 1",
        "SELECT 'it\\'s -- INSERT INTO a', \"INSERT INTO b\", 1 AS `INSERT INTO c` /* INSERT INTO d */",
        "WITH inserted AS (SELECT 1 AS insert) FROM inserted SELECT insert",
        "",  # no SQL, and Spark says so
        "-- nothing else",
        "1",
    ],
)
def test_a_question_is_left_alone(query: str) -> None:
    need_question(query)


@pytest.mark.parametrize(
    ("query", "word"),
    [
        ("DROP TABLE silver_events", "DROP"),
        ("\n/* SELECT */ create table a AS SELECT 1", "CREATE"),
        ("INSERT OVERWRITE DIRECTORY '/nowhere' SELECT 1", "INSERT"),
        ("/* /* SELECT */ */ CREATE TABLE a AS SELECT 1", "CREATE"),
        ("-- SELECT\nDELETE FROM silver_events", "DELETE"),
        ("SELECTED", "SELECTED"),
    ],
)
def test_whatever_else_is_refused_in_one_sentence(query: str, word: str) -> None:
    with pytest.raises(InvalidMessage, match=f"^{word} is no question: sql answers those that begin with"):
        need_question(query)


@pytest.mark.parametrize(
    "query",
    [
        "WITH a AS (SELECT 1) INSERT OVERWRITE DIRECTORY '/nowhere' SELECT * FROM a",
        "with a AS (SELECT '(') insert\n into silver_events SELECT * FROM a",
        "FROM silver_events INSERT/**/INTO bronze_events SELECT *",
        "/* a */ WITH a AS (SELECT 1) -- b\nINSERT OVERWRITE silver_events SELECT * FROM a",
    ],
)
def test_an_insert_is_found_behind_what_else_begins_a_question(query: str) -> None:
    with pytest.raises(InvalidMessage, match=r"^INSERT is no question, also behind WITH and FROM"):
        need_question(query)
