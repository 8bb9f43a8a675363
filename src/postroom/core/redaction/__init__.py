"""Redaction: replacing secrets and personal data in payloads and texts by markers.

Rule 1: redaction is idempotent: redacting the output again does not change it.
Rule 2: every input is handled. A value that is nested too deeply or keeps changing is replaced as a whole.
Rule 3: the fast path gives the same result as the slow path, which is the definition.
Rule 4: this package imports only the standard library and itself, so that its files can be shipped to Spark
        workers. `MODULES` lists the files; each comes after those it imports.
"""

from postroom.core.redaction.checks import luhn, mod97
from postroom.core.redaction.fields import DEFAULT_FIELDS
from postroom.core.redaction.redactor import Level, Redactor, level_for
from postroom.core.redaction.rules import EVERYTHING, RULES
from postroom.core.redaction.texts import PASSES_MAX, shape_of
from postroom.core.redaction.values import DEPTH_MAX

MODULES = (
    "checks",
    "rules",
    "fields",
    "signs",
    "texts",
    "triggers",
    "values",
    "splicing",
    "redactor",
)

__all__ = [
    "DEFAULT_FIELDS",
    "DEPTH_MAX",
    "EVERYTHING",
    "MODULES",
    "PASSES_MAX",
    "RULES",
    "Level",
    "Redactor",
    "level_for",
    "luhn",
    "mod97",
    "shape_of",
]
