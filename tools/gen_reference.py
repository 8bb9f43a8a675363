"""Writes docs/reference/cli.md from the commands themselves, and settings.md from the structs.

python tools/gen_reference.py            write the pages
python tools/gen_reference.py --check    fail when a page is not what it would write
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from postroom.cli import main as postroom_cli
from postroom.cli import zosmq
from postroom.cli.shell import CONFIG_NAME, CONFIG_VARIABLE, TRACE_VARIABLE
from postroom.settings import BusSettings, QueueSettings, Setting, described

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "reference"
HELP_COLUMNS = 88  # whatever the terminal of whoever runs this
NOTICE = "<!-- Written by `make docs`. Change the code, not this page. -->"

CLI_HEAD = f"""\
{NOTICE}

# Command line

Two commands are installed: `postroom`, and `zos-mq` with the options and the output of the original queue.

| | |
|---|---|
| Results | on stdout: JSON lines into a pipe or a file (or with `--json`), readable text on a terminal |
| Errors and warnings | on stderr, one line each |
| Exit code | 0 done, 1 failed, 2 wrong call |
| Signals | SIGTERM and SIGINT end any command; for `follow` that is its normal end, with 0 |
| Colours | on a terminal only, and not when `NO_COLOR` is set |
| Control characters | shown as escapes such as `\\x1b`, never sent to the terminal |
| Bytes that are not UTF-8 | kept; in JSON they are lone surrogates, as Python's `surrogateescape` has them |
| A bug in postroom | is reported in one line, too; `{TRACE_VARIABLE}=1` shows where it is |

Settings have their own page: [settings.md](settings.md).
"""

SETTINGS_HEAD = f"""\
{NOTICE}

# Settings

A flag (or an argument in Python) is stronger than the environment, the environment is stronger than
`{CONFIG_NAME}`, and that is stronger than the default. The library reads the environment only; the commands
also read the file named by `--config`, else by `{CONFIG_VARIABLE}`, else `./{CONFIG_NAME}` if there is one.

An empty variable counts as not set. Where two variables are named, the first is stronger. A value that does
not fit is refused in one sentence that names it, and so is a key that does not exist. Relative paths in the
file are relative to the file.

```toml
[bus]
path = "runs/messagebus.yaml"
rotate_bytes = 10_000_000

[queue]
root = "runs/queue"
session = "nightly"
```
"""


def pages() -> dict[Path, str]:
    """Every page, as it should be."""
    return {PAGES / "cli.md": cli_page(), PAGES / "settings.md": settings_page()}


def cli_page() -> str:
    sections = [
        *command_sections(postroom_cli.cli, postroom_cli.PROGRAM, None),
        *command_sections(zosmq.cli, zosmq.PROGRAM, None),
    ]
    return "\n".join([CLI_HEAD, *sections])


def command_sections(command: click.Command, name: str, parent: click.Context | None) -> Iterator[str]:
    """The help of a command, and then of the commands below it."""
    context = click.Context(
        command, info_name=name, parent=parent, terminal_width=HELP_COLUMNS, **command.context_settings
    )
    help_text = command.get_help(context).rstrip()
    yield f"## {context.command_path}\n\n```text\n{help_text}\n```\n"
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            yield from command_sections(command.commands[below], below, context)


def settings_page() -> str:
    return "\n".join([SETTINGS_HEAD, table("bus", BusSettings), table("queue", QueueSettings)])


def table(name: str, settings: type[BusSettings] | type[QueueSettings]) -> str:
    rows = "\n".join(setting_row(setting) for setting in described(settings))
    head = "| key | must be | default | environment | meaning |\n|---|---|---|---|---|"
    return f"## `[{name}]`\n\n{head}\n{rows}\n"


def setting_row(setting: Setting) -> str:
    default = "not set" if setting.default is None else f"`{str(setting.default).lower()}`"
    variables = "<br>".join(f"`{variable}`" for variable in setting.variables)
    return f"| `{setting.key}` | {setting.wants} | {default} | {variables} | {setting.description} |"


def main(arguments: list[str]) -> int:
    stale = [page for page, text in pages().items() if not page.exists() or page.read_text("utf-8") != text]
    for page in stale:
        if arguments == ["--check"]:
            print(f"{page.relative_to(ROOT)} is out of date: run `make docs`")
        else:
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(pages()[page], "utf-8")
            print(f"wrote {page.relative_to(ROOT)}")
    return 1 if stale and arguments == ["--check"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
