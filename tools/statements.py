"""The page of the engine's design: every statement, and the tests that hold it.

The statements are in tests/data/engine-statements.toml. A test names those that it holds with
`@pytest.mark.statement("name", …)`.
"""

import ast
import tomllib
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
STATEMENTS = TESTS / "data" / "engine-statements.toml"
DECISIONS = "../decisions/"
OTHERWISE = "Decided otherwise"  # the table of statements that a decision page replaces
INTRODUCTION = """\
# Statements of the Global Message Queue

`Engine` implements the architecture decision record of the Global Message Queue. This page lists each
statement of the record in the words of postroom, and the tests that hold it. Where postroom decided
otherwise, the decision page says why; the tests then hold what was decided.
"""


def statements_page() -> str:
    """The text of the page. A statement without a test and a marker without a statement are errors."""
    sections: dict[str, dict[str, str]] = tomllib.loads(STATEMENTS.read_text("utf-8"))
    decided = sections.pop(OTHERWISE)
    held = marked_tests()
    names = {name for section in sections.values() for name in section}
    if unknown := sorted((held.keys() | decided.keys()) - names):
        raise SystemExit(f"{STATEMENTS.name} has no statement named {', '.join(unknown)}")
    if without := sorted(names - held.keys()):
        raise SystemExit(f"no test is marked with the statement {', '.join(without)}")
    lines = [INTRODUCTION]
    for title, section in sections.items():
        lines += [f"## {title}\n", "| statement | held by |", "|---|---|"]
        for name, words in section.items():
            page = decided.get(name)
            otherwise = f" Decided otherwise: [{page}]({DECISIONS}{page})." if page else ""
            lines.append(f"| {words}{otherwise} | {'<br>'.join(held[name])} |")
        lines.append("")
    return "\n".join(lines)


def marked_tests() -> dict[str, list[str]]:
    """The marked tests of each statement."""
    held = defaultdict(list)
    for file in sorted(TESTS.rglob("test_*.py")):
        text = file.read_text("utf-8")
        if "mark.statement(" not in text:
            continue
        for found in ast.parse(text).body:
            if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
                for name in statements_of(found):
                    held[name].append(f"`{file.relative_to(TESTS)}` {found.name}")
    return held


def statements_of(test: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """The statements that the markers of a test name."""
    return [
        ast.literal_eval(argument)
        for decorator in test.decorator_list
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.statement"
        for argument in decorator.args
    ]
