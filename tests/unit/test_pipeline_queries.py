"""The functions that a query may call. Refused statements are tested with a real Spark."""

from pathlib import Path

from postroom.pipeline.query import queries
from postroom.pipeline.query.queries import functions


def test_the_list_of_functions_has_none_that_runs_code_or_reads_files() -> None:
    known = functions()
    assert {"count", "sum", "explode", "range", "+", "input_file_name"} <= known
    assert not known & {"reflect", "java_method", "try_reflect", "from_xml", "from_avro", "from_protobuf"}
    assert not {name for name in known if name.startswith(("xpath", "python_"))}


def test_the_list_of_functions_is_sorted_and_names_each_once() -> None:
    text = (Path(queries.__file__).parent / "functions.txt").read_text()
    words = [word for line in text.splitlines() if not line.startswith("# ") for word in line.split()]
    assert words == sorted(set(words))
    assert functions() == set(words)
