"""What must not be written down, taken out of payloads and texts.

Rule 1: what comes out may go in again: redacting twice is redacting once.
Rule 2: every input has an answer. What is too deep or too stubborn is replaced as a whole, never passed on.
Rule 3: the quick way comes to what the slow way comes to, which defines it.
Rule 4: this package imports the standard library and itself alone, so that its files can be sent to wherever
        a stream is read. `MODULES` are the files, each behind those that it imports.
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
    "views",
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
