"""The parts that all commands share: settings, output, opening a bus or a queue, signals, exit codes.

Rule 1: an error is one line on stderr; exit code 0 is success, 1 a failure, 2 a usage error.
Rule 2: SIGTERM and SIGINT end a command without a traceback; for a follower that is its normal end.
Rule 3: it is not an error when the reader of stdout closes the pipe.
"""

import atexit
import os
import re
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path, PosixPath
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, TypeVar

import click

from postroom.cli.render import Form, Output, OutputFailed, warn
from postroom.core.door import leaving
from postroom.errors import (
    EXIT_OK,
    EXIT_RUNTIME,
    EXIT_USAGE,
    InvalidMessage,
    PostroomError,
    exit_code,
    reason,
    shown_address,
)

if TYPE_CHECKING:
    from postroom.contracts.bus import Bus
    from postroom.contracts.queue import Queue
    from postroom.settings import Settings

CONFIG_NAME = "postroom.toml"
CONFIG_VARIABLE = "POSTROOM_CONFIG"
KEY_FILE_VARIABLE = "POSTROOM_KEY_FILE"  # as in `system.crypto.encryption`, which a command may not need
TRACE_VARIABLE = "POSTROOM_TRACEBACK"
PROGRESS_EVERY_S = 1.0
COUNT_MAX = 1_000_000_000  # of messages in one result
COUNT = click.IntRange(0, COUNT_MAX)
_PLAIN_WORDS = (
    (re.compile(r"\s*\n\s*"), " "),
    (re.compile(r"Directory ('.*') is a file"), r"\1 is a file, and not a folder"),
    (re.compile(r"is not a valid integer(?: range)?"), "is not a whole number"),
    (re.compile(r"is not a valid float(?: range)?"), "is not a number"),
    (re.compile(r"is not in the range (\S+)<=x<=(\S+?)(\.?)$"), r"is not a number from \1 to \2\3"),
    (re.compile(r"is not in the range x>=(\S+?)(\.?)$"), r"is not a number of \1 or more\2"),
)
ANY_PATH = click.Path()
HELP_FLAGS = {"-h", "--help"}
HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}


class Stopped(BaseException):
    """SIGTERM or SIGINT. Not an `Exception`, so that no error handler catches it."""


class Shell:
    """One run of a command line program."""

    def __init__(self, program: str, form: Form = "auto", config: Path | None = None) -> None:
        self.program = program
        self.config = config
        self.queue_root: Path | None = None
        """The value of --root in front of the command."""
        self.output = Output(sys.stdout, form)
        self._noted_at = time.monotonic()

    @cached_property
    def settings(self) -> "Settings":
        """The settings of the file and the environment. Loaded on first use: --help must not fail on them."""
        from postroom.settings import load

        return load(self.config_file(), os.environ)

    def check_settings(self) -> None:
        """Refuse a named settings file that is absent or invalid, even if the command needs no setting."""
        _ = self.settings

    def data_place(self, given: Path | None) -> Path:
        """The place of the data that an option or the settings name."""
        place = self.default_place(given)
        if place is None:
            raise click.UsageError(
                "say where the data is: --data DIR, POSTROOM_DATA, or data in [up] of the settings file"
            )
        return place

    def default_place(self, given: Path | None, *others: str | None) -> Path | None:
        """The place that an option names; else that of the settings, unless one of `others` names another."""
        if given is not None or any(other is not None for other in others):
            return given
        place = self.settings.up.data
        if place is not None:
            check_key_file(place)
        return place

    def store_place(self, data: Path) -> Path:
        """Where the messages of a data folder are: in the store of the settings, else in the folder."""
        store = self.settings.up.store
        return data if store is None or isinstance(data, StoreAddress) else StoreAddress.of(store)

    def use_key_file(self, path: Path) -> None:
        """Let every store of this process and of its children use a key file."""
        os.environ[KEY_FILE_VARIABLE] = str(path.absolute())

    def use_key_file_of_settings(self) -> None:
        """As `use_key_file`, with the file that the settings file names. The environment goes first."""
        if not os.environ.get(KEY_FILE_VARIABLE) and self.config_file() is not None:
            found = self.settings.encryption.key_file
            if found is not None:
                self.use_key_file(found)

    def config_file(self) -> Path | None:
        """The settings file; None without one."""
        if self.config is not None:
            return self.config
        if os.environ.get(CONFIG_VARIABLE):
            return Path(os.environ[CONFIG_VARIABLE])
        here = Path(CONFIG_NAME)
        return here if here.is_file() else None

    def bus_path(self, path: Path | None) -> Path:
        found = path or self.settings.bus.path
        if found is None:
            raise click.UsageError("there is no bus to use: pass --bus PATH, or set POSTROOM_BUS")
        return found

    def bus(self, path: Path | None, durability: Any = None) -> "Bus":
        from postroom.contracts.bus import Bus

        self.show_warnings()
        chosen = self.settings.bus
        return Bus(
            self.bus_path(path),
            lock_timeout_s=chosen.lock_timeout_s,
            poll_interval_s=chosen.poll_interval_s,
            rotate_bytes=chosen.rotate_bytes,
            durability=durability or chosen.durability,
        )

    def queue(self, root: Path | None, durability: Any = None) -> "Queue":
        from postroom.contracts.queue import Queue

        self.show_warnings()
        chosen = self.settings.queue
        return Queue(
            root or self.queue_root or chosen.root,
            chosen.body_threshold,
            durability=durability or chosen.durability,
            disabled=chosen.disabled,
        )

    def show_warnings(self) -> None:
        """Print what the library logs, such as skipped damage, as lines on stderr."""
        import logging

        handler = logging.Handler()
        handler.emit = lambda record: warn(  # type: ignore[method-assign]
            self.program, f"{record.levelname.lower()}: {record.getMessage()}"
        )
        logging.getLogger("postroom").handlers = [handler]

    def note(self, text: str) -> None:
        """Print a line on stderr if that is a terminal."""
        if sys.stderr.isatty():
            warn(self.program, text)

    def note_progress(self, text: str) -> None:
        """As `note`, at most every `PROGRESS_EVERY_S`."""
        now = time.monotonic()
        if now >= self._noted_at + PROGRESS_EVERY_S:
            self._noted_at = now
            self.note(text)


# ---- reading a body --------------------------------------------------------------------------


def read_body(shell: Shell, body: str | None, body_file: str | None, bytes_max: int) -> str:
    """The body from an option, a file or stdin. Bytes that are not UTF-8 become surrogate escapes."""
    if body is not None and body_file is not None:
        raise click.UsageError("give the body once: --body or --body-file, not both")
    if body is not None and body != "-":
        return os.fsencode(body).decode("utf-8", "surrogateescape")
    if body_file is not None and body_file != "-":
        with Path(body_file).open("rb") as file:
            raw = file.read(bytes_max + 1)
    elif sys.stdin is None:
        raw = b""
    else:
        if sys.stdin.isatty():
            shell.note("reading the body from this terminal; end it with Ctrl-D")
        raw = sys.stdin.buffer.read(bytes_max + 1)
    if len(raw) > bytes_max:
        raise InvalidMessage(f"the body is longer than {bytes_max} bytes")
    return raw.decode("utf-8", "surrogateescape")


# ---- signals and pipes -----------------------------------------------------------------------


def reader_gone() -> bool:
    """Whether the reader of stdout has closed it. A follower would otherwise notice only at its next line."""
    try:
        watched = select.poll()
        watched.register(sys.stdout.fileno(), 0)
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in watched.poll(0))
    except (OSError, ValueError, AttributeError):
        return False


def _stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - a signal handler's signature
    raise Stopped


@contextmanager
def _stoppable() -> Iterator[None]:
    """Raise `Stopped` at SIGTERM and SIGINT, and restore the previous handlers afterwards."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    try:
        before = [signal.signal(number, _stop) for number in numbers]
    except ValueError:  # not the main thread, which alone may set handlers
        yield
        return
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


# ---- one run ---------------------------------------------------------------------------------


def leave(code: int) -> NoReturn:
    """End the process.

    After a signal, threads of Arrow and Delta may still run. They crash while the interpreter shuts down, so
    then the process exits without that shutdown.
    """
    if "pyarrow" not in sys.modules and "deltalake" not in sys.modules:
        sys.exit(code)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()  # noqa: SLF001 - `os._exit` does not run them
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a closed pipe, or a closed stream
            stream.flush()
    os._exit(code)


def run(command: click.Command, program: str, arguments: list[str] | None = None) -> int:
    """Run a command line and return its exit code."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:  # open a missing one, so that no bus file gets its number
            os.open(os.devnull, os.O_RDWR)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - for the rest of the process
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 - the same
    try:
        with _stoppable():
            code = _guarded(command, program, sys.argv[1:] if arguments is None else arguments)
            failure = _flush(sys.stdout)  # a full disk is an error, a closed pipe is not
            if failure is not None and code == EXIT_OK:  # else a failure was already reported
                code = _failed(program, str(OutputFailed(failure)))
            _flush(sys.stderr)
            return code
    except Stopped:  # the signal came outside of `_guarded`
        return EXIT_RUNTIME


def _guarded(command: click.Command, program: str, arguments: list[str]) -> int:
    """As `command.main`, but with our messages and exit codes: it returns 1 for a closed pipe."""
    result: object
    try:
        if f"_{program.upper().replace('-', '_')}_COMPLETE" in os.environ:
            result = command.main(arguments, prog_name=program)
        else:
            with command.make_context(program, arguments) as context:
                result = command.invoke(context)
    except click.exceptions.Exit as done:
        result = done.exit_code
    except Stopped:
        result = _failed(program, "interrupted")
    except BrokenPipeError:
        result = EXIT_OK
    except click.exceptions.NoArgsIsHelpError as error:
        with suppress(OSError):
            click.echo(error.format_message(), err=True)
        result = EXIT_USAGE
    except click.ClickException as error:
        used = getattr(error, "ctx", None)
        hint = "" if used is None else f"; try '{used.command_path} --help'"
        result = _failed(program, plain(error.format_message()).rstrip(".") + hint, error.exit_code)
    except Exception as error:  # noqa: BLE001 - rule 1
        result = exit_code(error)
        if os.environ.get(TRACE_VARIABLE):
            sys.stderr.write(leaving("".join(traceback.format_exception(error))))
        else:
            warn(program, sentence(error))
    return result if isinstance(result, int) else EXIT_OK


def _flush(stream: TextIO) -> OSError | None:
    """Flush, or drop the buffer: the interpreter would print an error about it at exit."""
    try:
        stream.flush()
    except OSError as error:
        with suppress(OSError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
            stream.flush()
        return None if isinstance(error, BrokenPipeError) else error
    return None


def sentence(error: BaseException) -> str:
    """The message of an error. An unexpected error is a bug in postroom, and its message says so."""
    if isinstance(error, OSError) and not isinstance(error, PostroomError) and error.strerror:
        return f"{os.fsdecode(error.filename)}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, PostroomError):
        return str(error)
    if isinstance(error, UnicodeDecodeError):
        return f"the input is not text: {reason(error)}"
    return f"unexpected {type(error).__name__}: {error} (set {TRACE_VARIABLE}=1 to see where)"


def _failed(program: str, text: str, code: int = EXIT_RUNTIME) -> int:
    warn(program, text)
    return code


def plain(message: str) -> str:
    """A usage error of click, on one line and without the names of click's types."""
    for pattern, words in _PLAIN_WORDS:
        message = pattern.sub(words, message)
    return message


# ---- options that several commands have -------------------------------------------------------

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def together(*options: Callable[[Decorated], Decorated]) -> Callable[[Decorated], Decorated]:
    """Combine options into one decorator, in the given order."""

    def decorate(function: Decorated) -> Decorated:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


body_options = together(
    click.option("--body", metavar="TEXT", help="The body; - is stdin.  [default: stdin]"),
    click.option("--body-file", metavar="FILE", help="Read the body from a file; - is stdin."),
)
durability_option = click.option(
    "--durability",
    type=click.Choice(["os", "group", "fsync"]),
    help="When the message counts as stored: in the page cache, or after an fsync.  "
    "[default: from the settings, else os]",
)


def as_path(context: click.Context, parameter: click.Parameter, value: str | None) -> Path | None:  # noqa: ARG001 - click's
    """Refuse an empty path, which would mean the current folder and usually comes from an unset variable.

    Refuse an address, which would become a folder of that name.
    """
    if value is None:
        return None
    from postroom.settings import is_address

    if value == "":
        raise click.BadParameter("the path is empty")
    if is_address(value):
        raise click.BadParameter(f"{shown_address(value)} is an address, and not a path on this machine")
    return Path(value)


def as_folder(context: click.Context, parameter: click.Parameter, value: str | None) -> Path | None:
    """A data folder, which must not hold the key file in use."""
    folder = as_path(context, parameter, value)
    if folder is not None:
        check_key_file(folder)
    return folder


def check_key_file(folder: Path) -> None:
    """Refuse the key file of this command inside a data folder."""
    if os.environ.get(KEY_FILE_VARIABLE):
        from postroom.system.crypto.key_file import check_outside

        check_outside(Path(os.environ[KEY_FILE_VARIABLE]), folder)


def path_option(
    *names: str, metavar: str, text: str, required: bool = False, kind: click.Path = ANY_PATH
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """An option whose value is a path. That of `--data` is a data folder, without the key file in use."""
    callback = as_folder if "--data" in names else as_path
    return click.option(*names, type=kind, callback=callback, required=required, metavar=metavar, help=text)


DATA_DEFAULT = "[default: $POSTROOM_DATA, else data in [up] of the settings]"


def needed_data_option(text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`--data` of a command that works on a data folder only."""

    def as_needed(context: click.Context, parameter: click.Parameter, value: str | None) -> Path | None:
        shell = context.find_object(Shell)
        folder = as_folder(context, parameter, value)
        return folder if shell is None else shell.data_place(folder)

    folder = click.Path(file_okay=False)
    return click.option(
        "--data", type=folder, callback=as_needed, metavar="DIR", help=f"{text}  {DATA_DEFAULT}"
    )


class StoreAddress(PosixPath):
    """The address of a store, given where a data folder can be given. As text it shows no password."""

    url: str
    shown: str

    @classmethod
    def of(cls, url: str) -> "StoreAddress":
        shown = shown_address(url)
        address = cls(shown)
        address.url, address.shown = url, shown
        return address

    def __str__(self) -> str:
        # A path would have one slash after the scheme.
        return getattr(self, "shown", None) or super().__str__()


def as_place(context: click.Context, parameter: click.Parameter, value: str | None) -> Path | None:
    """A data folder, or the address of a store."""
    from postroom.settings import is_address
    from postroom.stores.open import SERVERS

    if value is not None and value.startswith(SERVERS):
        return StoreAddress.of(value)
    if value is not None and is_address(value):
        raise click.BadParameter(
            "it must be a data folder, or an address as postgres://user@host/db or amqp://host/?ledger=URL"
        )
    return as_folder(context, parameter, value)


def place_option(text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`--data`: a data folder, or the address of a store."""
    return click.option(
        "--data", type=click.Path(file_okay=False), callback=as_place, metavar="DIR", help=text
    )


def parse_rate(text: str) -> float:
    """A number of calls a second; 0 means no limit."""
    from postroom.settings import RATE_MAX

    return _parsed(text, RATE_MAX, f"a number of calls a second from 0 to {RATE_MAX:,.0f}")


def parse_wait(text: str) -> float:
    """A finite number of seconds, 0 or more."""
    return _parsed(text, sys.float_info.max, "a number of seconds, 0 or more")


def _parsed(text: str, most: float, what: str) -> float:
    with suppress(ValueError):
        if 0 <= (number := float(text)) <= most:
            return number
    raise click.BadParameter(f"{text!r} is not {what}")


def parse_time(text: str) -> Any:
    """An RFC 3339 time."""
    from postroom.core.times import parse_utc

    try:
        return parse_utc(text)
    except InvalidMessage as error:
        raise click.BadParameter(str(error)) from None


class TimeoutOption(click.Option):
    """`--timeout-s`. Its earlier name `--timeout` still works, but is not shown in the help."""

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        super().add_to_parser(parser, ctx)
        parser.add_option(self, ["--timeout"], dest=self.name, action="store", nargs=1)


def timeout_option(text: str, default: float | None = None) -> Callable[[Decorated], Decorated]:
    return click.option(
        "--timeout-s",
        cls=TimeoutOption,
        type=parse_wait,
        default=default,
        show_default=default is not None,
        metavar="S",
        help=text,
    )


def json_option() -> click.Option:
    return click.Option(
        ["--json"],
        is_flag=True,
        expose_value=False,
        callback=_choose_json,
        help="Print JSON lines, also on a terminal.",
    )


def _choose_json(context: click.Context, parameter: click.Parameter, value: bool) -> None:  # noqa: ARG001 - click's signature
    shell = context.find_object(Shell)
    if value and shell is not None:
        shell.output.form = "json"


def add_json_option(group: click.Group) -> None:
    """Give every command of a group the option --json."""
    for command in group.commands.values():
        command.params.append(json_option())


def note_missing(shell: Shell, path: Path) -> None:
    """Warn about a path that does not exist: it reads as empty, but may be a typing error."""
    if not path.exists():
        warn(shell.program, f"warning: there is nothing at {path} yet")
