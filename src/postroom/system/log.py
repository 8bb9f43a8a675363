"""The loggers of the library. What they log is redacted before any handler sees it.

Rule 1: only `library_log` makes a logger of postroom.
Rule 2: an exception is replaced by one of the same name whose message is redacted: not every handler reads
        the formatted text.
"""

import logging
import traceback

from postroom.core.door import leaving

CHAIN_MAX = 20  # causes of an exception that are kept


def library_log(name: str) -> logging.Logger:
    """The logger of this name, below `postroom`."""
    log = logging.getLogger(name)
    log.addFilter(_redact)  # the same function a second time changes nothing
    return log


def _redact(record: logging.LogRecord) -> bool:
    record.msg, record.args = leaving(_message(record)), None
    if record.exc_info and record.exc_info[1] is not None:
        error = _redacted(record.exc_info[1], CHAIN_MAX)
        record.exc_info = type(error), error, error.__traceback__
        record.exc_text = leaving("".join(traceback.format_exception(error)).rstrip("\n"))
    return True


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # noqa: BLE001 - a wrong line of the log must not stop what it reports
        return str(record.msg)


def _text(error: object) -> str:
    try:
        return leaving(str(error))
    except Exception:  # noqa: BLE001 - the class of a handler's error may be broken
        return ""


def _redacted(error: BaseException, causes: int) -> BaseException:
    kind = type(error)
    named = type(
        kind.__name__, (Exception,), {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    )
    copy: BaseException = named(_text(error)).with_traceback(error.__traceback__)
    for note in getattr(error, "__notes__", ()):
        copy.add_note(_text(note))
    if causes:
        copy.__cause__ = error.__cause__ and _redacted(error.__cause__, causes - 1)
        copy.__context__ = error.__context__ and _redacted(error.__context__, causes - 1)
    copy.__suppress_context__ = error.__suppress_context__
    return copy
