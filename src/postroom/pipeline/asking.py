"""What `sql` answers: questions. Tables change by the jobs alone, which know how far each of them is."""

import re
from typing import Final

from postroom.errors import InvalidMessage

QUESTIONS: Final = ("SELECT", "WITH", "FROM", "VALUES", "TABLE", "SHOW", "DESCRIBE", "DESC", "EXPLAIN")
"""The words with which one begins. Spark would take others, and leave tables of its own in the folder."""

_QUOTED: Final = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|`[^`]*`"""
_COMMENT: Final = r"--[^\n]*|/\*(?:(?!/\*|\*/).)*\*/"  # with none inside it
_ASIDE: Final = re.compile(rf"({_QUOTED})|{_COMMENT}", re.DOTALL)
_FIRST_WORD: Final = re.compile(r"[\s(]*([^\W\d]\w*)")
_INSERT: Final = re.compile(r"\bINSERT\s+(?:INTO|OVERWRITE)\b", re.IGNORECASE)


def need_question(query: str) -> None:
    """Refuse what changes something. What is no SQL at all is left to Spark, which says where it is wrong."""
    plain = _without_asides(query)
    first = _FIRST_WORD.match(plain)
    word = first[1].upper() if first else ""
    if word and word not in QUESTIONS:
        raise InvalidMessage(f"{word} is no question: sql answers those that begin with {_listed(QUESTIONS)}")
    if _INSERT.search(plain):  # begins with WITH or FROM
        raise InvalidMessage("INSERT is no question, also behind WITH and FROM: sql changes nothing")


def _without_asides(query: str) -> str:
    """Without comments and what they say, and with nothing in its quotes. Comments may hold comments."""
    while (plain := _ASIDE.sub(lambda aside: "''" if aside[1] else " ", query)) != query:
        query = plain
    return query


def _listed(words: tuple[str, ...]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"
