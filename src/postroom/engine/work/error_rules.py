"""The rule of a deployment for an error: by its class, by a base of it, or by what caused it.

Rule 1: a name such as "openai.RateLimitError" is looked up in the modules that are imported already: an
        error of a library that is not imported was never raised.
Rule 2: the class comes before its bases, and an error before its causes. Only `raise … from` names a cause:
        an error of a fallback is not caused by the one that made the fallback necessary.
"""

import sys
from collections.abc import Mapping
from typing import Final

from postroom.core.lifecycle.retry import Retry
from postroom.engine.rules.policy import ErrorName

CAUSES_MAX: Final = 20


def rule_of(error: BaseException, rules: Mapping[ErrorName, Retry], *, with_causes: bool) -> Retry | None:
    """The rule for an error; None when there is none."""
    cause: BaseException | None = error
    for _ in range(CAUSES_MAX if with_causes else 1):
        if cause is None or not rules:
            break
        for kind in type(cause).__mro__:
            for name, rule in rules.items():
                if kind is name or (isinstance(name, str) and _is_named(kind, name)):
                    return rule
        cause = cause.__cause__
    return None


def _is_named(kind: type, name: str) -> bool:
    """Whether a class has this dotted name, as its own one or as one that a module gives it."""
    if f"{kind.__module__}.{kind.__qualname__}" == name:
        return True
    home, _, attribute = name.rpartition(".")
    module = sys.modules.get(home)
    if module is None:
        return False
    if attribute == kind.__name__:  # a module may import its names when they are first asked for
        return getattr(module, attribute, None) is kind
    return vars(module).get(attribute) is kind
