"""The pages are true: their programs run and print the output that they show, and their links exist.

Rule 1: every `python` and `sh` block of a page runs as a process, in the order of the page, all in one empty
        folder. A `python` block that begins with a comment such as `# worker.py` is saved under that name
        instead; a later block runs it.
Rule 2: a `text` block after such a block is its output. Only ids, times and checksums may differ.
Rule 3: a block without a language is neither run nor checked. Other languages are only shown, and must be
        known here.
Rule 4: port 8800 of a page is replaced by a free port, and so is the default port of NATS: other programs may
        use both. A process that a page leaves running has its process id in a file that ends in .pid, and is
        ended with the page.
"""

import importlib
import inspect
import os
import re
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from postroom import Bus, Engine, Mail, Queue, Tasks, errors
from postroom.client import TaskClient
from tests import warmpython
from tests.waiting import HANG_GUARD_S

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent

README = ROOT / "README.md"
CONTRACTS = ROOT / "docs" / "contracts"
LIVE = [
    README,
    *(page for part in ("tutorial", "howto", "contracts") for page in (ROOT / "docs" / part).glob("*.md")),
]
PAGES = [
    *ROOT.glob("*.md"),
    *(page for part in ("docs", "bench", "examples") for page in (ROOT / part).rglob("*.md")),
]
PROGRAMS_WITH_OWN_TEST = {"demo.py", "engineact.py", "goalact.py", "mailact.py", "pipelineact.py"}
PROGRAMS = sorted(
    path
    for path in (ROOT / "examples").iterdir()
    if path.suffix in {".py", ".sh"} and path.name not in PROGRAMS_WITH_OWN_TEST
)
FIRST_EXAMPLE_LINES_MAX = 14

RUN = {"python", "sh"}
SHOWN = {"", "text", "toml", "yaml", "json", "mermaid", "sql"}
PORT_SHOWN = "8800"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE_NAME = re.compile(r"# (\w+\.py)\n")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")

# Text that differs from run to run, and its replacement before two outputs are compared.
CHANGING = {
    re.compile(r"MSG-\d{8}-\d{6}-\d{9}-PID\d{5}-\d{4}"): "MSG-ID",
    re.compile(r"\bm-\d{19}-[0-9a-f]{8}-\d+"): "m-ID",
    re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z"): "TIME",
    re.compile(r"\.\d{8}-\d{6}(-\d{4})?\.archived"): ".STAMP.archived",
    re.compile(r"\.damaged-\d{19}"): ".damaged-NANOSECONDS",
    re.compile(r'(crc"?: ?"?)[0-9a-f]{8}'): r"\1CHECKSUM",
    re.compile(r"\bpr_[\w-]{43}"): "TOKEN",
    re.compile(r"\bt[0-9a-f]{8}-(?=\d)"): "STORE-",
    re.compile(r'("ts_us":)\d{16}'): r"\1MICROSECONDS",
    re.compile(r'("duration_us":)\d+'): r"\1MICROSECONDS",
}


class Block(NamedTuple):
    language: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text("utf-8")
    return [
        Block(found[1], found[2], text.count("\n", 0, found.start()) + 2) for found in FENCE.finditer(text)
    ]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def masked(output: str) -> list[str]:
    for pattern, word in CHANGING.items():
        output = pattern.sub(word, output)
    return [line.rstrip() for line in output.rstrip().splitlines()]


@pytest.fixture(name="environ")
def clean_environ(tmp_path: Path) -> dict[str, str]:
    """The installed commands first on the PATH, and none of the tester's own settings."""
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith(("POSTROOM_", "ZOS_", "XDG_"))
    }
    return {**kept, "PATH": f"{BIN}{os.pathsep}{kept.get('PATH', '')}", "HOME": str(tmp_path / "home")}


def run(command: list[str], folder: Path, environ: dict[str, str]) -> tuple[int, str]:
    """The exit code, and stdout and stderr in the order in which a terminal would show them."""
    with warmpython.popen(
        command,
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        try:
            output, _ = process.communicate(timeout=HANG_GUARD_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return process.returncode, output.decode()


# ---- the blocks and programs of the pages ------------------------------------------------------


@pytest.mark.parametrize("page", LIVE, ids=name)
def test_every_block_prints_the_output_that_its_page_shows(
    page: Path, tmp_path: Path, environ: dict[str, str]
) -> None:
    port = free_port()
    environ |= {"POSTROOM_HTTP_PORT": port, "POSTROOM_NATS_PORT": free_port()}
    with empty_folder(tmp_path / "page") as folder:
        for block, following in pairwise([*blocks(page), Block("", "", 0)]):
            if block.language not in RUN:
                continue
            where = f"{name(page)}:{block.line}"
            text = block.text.replace(PORT_SHOWN, port)
            saved = FILE_NAME.match(text)
            if block.language == "python" and saved:
                (folder / saved[1]).write_text(text, "utf-8")
                continue
            command = [sys.executable, "-c"] if block.language == "python" else ["sh", "-e", "-c"]
            code, output = run([*command, text], folder, environ)
            assert code == 0, f"{where} failed:\n{output}"
            if following.language == "text":
                shown = output.replace(port, PORT_SHOWN)
                assert masked(shown) == masked(following.text), f"{where} printed:\n{output}"


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


@contextmanager
def empty_folder(folder: Path) -> Iterator[Path]:
    """A folder for a page. Processes that the page left running are ended with it."""
    folder.mkdir()
    try:
        yield folder
    finally:
        for file in folder.glob("*.pid"):
            with suppress(ProcessLookupError):
                os.kill(int(file.read_text()), signal.SIGTERM)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_has_a_known_language(page: Path) -> None:
    assert {block.language for block in blocks(page)} <= RUN | SHOWN


@pytest.mark.parametrize("program", PROGRAMS, ids=name)
def test_every_example_runs(program: Path, tmp_path: Path, environ: dict[str, str]) -> None:
    code, output = run(["python" if program.suffix == ".py" else "sh", str(program)], tmp_path, environ)
    assert code == 0, output
    assert output.strip()


def test_the_first_example_of_the_readme_is_short_and_shows_its_output() -> None:
    languages = [block.language for block in blocks(README)]
    first = languages.index("python")
    assert languages[first + 1] == "text"
    assert blocks(README)[first].text.count("\n") <= FIRST_EXAMPLE_LINES_MAX


# ---- links and titles --------------------------------------------------------------------------


def outside_fences(page: Path) -> str:
    return FENCE.sub("", page.read_text("utf-8"))


def anchors(page: Path) -> set[str]:
    """The anchors of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", outside_fences(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """The relative links of a page, as file and anchor."""
    for target in LINK.findall(outside_fences(page)):
        if ":" not in target:
            path, _, anchor = target.partition("#")
            yield ((page.parent / path).resolve() if path else page), anchor


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_relative_link_has_a_target(page: Path) -> None:
    for target, anchor in links(page):
        assert target.exists(), f"{name(page)} links to {target}"
        if anchor:
            assert anchor in anchors(target), f"{name(page)} links to {target}#{anchor}"


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached: set[Path] = set()
    waiting = [README]
    while waiting:
        page = waiting.pop()
        if page not in reached and page.suffix == ".md" and page.exists():
            reached.add(page)
            waiting += [target for target, _ in links(page)]
    assert set(PAGES) - reached == set()


def test_every_decision_page_has_its_row_and_the_three_headings() -> None:
    folder = ROOT / "docs" / "decisions"
    subjects, _, designs = (folder / "README.md").read_text("utf-8").partition("## Designs")
    row = re.compile(r"^\| \[(.+)\]\((\S+)\) \| \S", re.MULTILINE)
    for rows, headings in ((subjects, ["Context", "Decision", "Consequences"]), (designs, None)):
        for title, page in row.findall(rows):
            text = (folder / page).read_text("utf-8")
            assert text.startswith(f"# {title}\n"), page
            assert headings is None or re.findall(r"^## (.+)$", text, re.MULTILINE) == headings, page
    listed = [page for _, page in row.findall(subjects + designs)]
    assert sorted(listed) == sorted(page.name for page in folder.glob("*.md") if page.name != "README.md")


# ---- limits, errors and methods ----------------------------------------------------------------

LIMITED = (
    "core.formats.buswire",
    "core.formats.foreign_bus",
    "core.formats.queuewire",
    "core.names",
    "contracts.bus",
    "contracts.queue",
    "contracts.tasks.task_input",
    "contracts.tasks.task_operations",
    "contracts.tasks.tasks",
    "logs.busfile",
    "logs.queuefile",
    "nudges.notifier",
    "stores.base",
    "stores.memory",
    "stores.sqlite.sql.queries",
    "stores.sqlite.checkpoints",
    "stores.event_runs",
    "stores.group_commit",
    "stores.sqlite.store",
    "stores.sqlite.file",
    "stores.sqlite.ledger",
    "stores.sqlite.parts",
    "stores.sqlite.transaction",
    "stores.postgres.store",
    "stores.postgres.connection",
    "stores.own_ids",
    "stores.postgres.lanes",
    "stores.postgres.ledger",
    "stores.postgres.parts",
    "stores.postgres.refusal",
    "stores.postgres.rows",
    "stores.postgres.transaction",
    "server.folder.audit_table",
    "nudges.database_notifier",
    "core.lifecycle.lifecycle",
    "core.mail.mailbox",
    "core.mail.mq9",
    "core.mail.mq9replies",
    "core.nats.natswire",
    "core.nats.subjects",
    "contracts.audit",
    "contracts.mail.cards.card_registry",
    "contracts.mail.options",
    "contracts.mail.subscriptions",
    "contracts.mail.fetch",
    "contracts.mail.public_list",
    "logs.mail_records",
    "contracts.mail.requests",
    "logs.mail_log",
    "contracts.mail.mailboxes",
    "audit.shipper",
    "audit.index",
    "core.history.history_checker",
    "core.lifecycle.backpressure",
    "core.tokens.token_rules",
    "core.tokens.provider_headers",
    *(
        ".".join(module.relative_to(ROOT / "src/postroom").with_suffix("").parts)
        for room in ("calls", "engine", "goals", "sandbox", "server", "client", "mcp", "page")
        for module in sorted((ROOT / "src/postroom" / room).rglob("[a-z]*.py"))
    ),
    "cli.program",
    "stores.rabbitmq.store",
    "stores.rabbitmq.lanes",
    "stores.rabbitmq.link",
)
INTERNAL = {"after_fork"}  # called by postroom.system.handles only
LIMIT = re.compile(r"^([A-Z]\w*_MAX)(?:: Final)? = ", re.MULTILINE)
FIELD = re.compile(r"^class (\w+)|^    (\w+_max): \w+ = [\d(]", re.MULTILINE)  # with a value of its own
LIMIT_ROW = re.compile(r"^\| `([a-z0-9_.]+)\.([A-Z_]+|[A-Z]\w+\.\w+)` \| ([\d,.]+) ", re.MULTILINE)


def limits_of(module: str) -> set[str]:
    """Limits of a module: constants such as `A_MAX`, and fields such as `KindLimits.a_max`."""
    text = (ROOT / "src/postroom" / f"{module.replace('.', '/')}.py").read_text("utf-8")
    found, struct = set(LIMIT.findall(text)), ""
    for name, field in FIELD.findall(text):
        struct = name or struct
        found |= {f"{struct}.{field}"} if field and struct.endswith("Limits") else set()
    return found


def test_limits_on_the_pages_match_the_code() -> None:
    documented = [
        row for page in CONTRACTS.glob("*.md") for row in LIMIT_ROW.findall(page.read_text("utf-8"))
    ]
    assert documented
    for module, constant, value in documented:
        struct, _, field = constant.rpartition(".")
        there = importlib.import_module(f"postroom.{module}")
        found = getattr(getattr(there, struct)() if struct else there, field)
        assert Decimal(value.replace(",", "")) == Decimal(str(found)), f"{module}.{constant}"
    for module in LIMITED:
        shown = {constant for where, constant, _ in documented if where == module}
        assert limits_of(module) - shown == set()


def test_every_error_is_on_a_contract_page() -> None:
    pages = "".join(page.read_text("utf-8") for page in CONTRACTS.glob("*.md"))
    kinds = [
        found for found in vars(errors).values() if isinstance(found, type) and issubclass(found, Exception)
    ]
    assert [kind.__name__ for kind in kinds if f"`{kind.__name__}`" not in pages] == []


def call(contract: type, name: str) -> str:
    """A method with its parameters as on a page, such as `tail(n=100)`."""
    parts = []
    parameters = list(inspect.signature(getattr(contract, name)).parameters.values())[1:]
    for parameter, before in zip(parameters, [None, *parameters], strict=False):
        if parameter.kind is parameter.KEYWORD_ONLY and (before is None or before.kind is not parameter.kind):
            parts.append("*")
        default = parameter.default
        shown = f'"{default}"' if isinstance(default, str) else repr(default)
        star = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        plain = f"{star}{parameter.name}"
        parts.append(plain if default is parameter.empty else f"{parameter.name}={shown}")
    return f"{contract.__name__ if name == '__init__' else name}({', '.join(parts)})"


@pytest.mark.parametrize(
    ("contract", "page"),
    [
        (Bus, "bus.md"),
        (Queue, "queue.md"),
        (Tasks, "tasks.md"),
        (TaskClient, "tasks.md"),
        (Engine, "engine.md"),
        (Mail, "mail.md"),
    ],
)
def test_every_public_method_is_on_its_contract_page(contract: type, page: str) -> None:
    text = (CONTRACTS / page).read_text("utf-8")
    members = {found: value for one in reversed(contract.__mro__) for found, value in vars(one).items()}
    public = {found: value for found, value in members.items() if not found.startswith("_")}
    methods = [found for found, value in public.items() if isinstance(value, types.FunctionType)]
    calls = {call(contract, found) for found in ["__init__", *methods] if found not in INTERNAL}
    properties = {found for found, value in public.items() if isinstance(value, property)}
    assert {shown for shown in calls | properties if f"`{shown}`" not in text} == set()
