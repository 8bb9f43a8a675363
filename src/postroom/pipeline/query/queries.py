"""The queries that `sql` accepts: they read the tables of one folder and nothing else, and write nothing.

Rule 1: Spark's own parser parses a query. The plan that was checked is the plan that is executed; the text is
        not parsed a second time.
Rule 2: allow-lists name the plans, functions and expressions of a query. Any other is refused, also one that
        a later version of Spark adds.
Rule 3: the session is a second barrier. It reads no file by its path, substitutes no variables and commits no
        files. The parser reads the settings of the active session, so this session is active while it parses.
"""

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from py4j.java_gateway import JavaObject, is_instance_of  # type: ignore[import-untyped]

from postroom.errors import InvalidMessage, InvalidSetting
from postroom.pipeline.spark.jvm import active_session, jvm_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

PLAN_NODES_MAX: Final = 20_000  # of a parsed query; each takes some calls into the JVM

READ_ONLY: Final = {
    "spark.sql.runSQLOnFiles": "false",
    "spark.sql.variable.substitute": "false",  # ${env:NAME} would be the environment of this process
    # Spark commits every file with an instance of this class, which is abstract and has none.
    "spark.sql.sources.commitProtocolClass": "org.apache.spark.internal.io.FileCommitProtocol",
    "spark.sql.streaming.commitProtocolClass": "org.apache.spark.internal.io.FileCommitProtocol",
}
"""Settings of the session in which queries run."""

_CATALYST: Final = "org.apache.spark.sql.catalyst."
_EXPRESSIONS: Final = f"{_CATALYST}expressions."
"""The parser's classes for operators and literals. A function is only a name until it is analyzed."""
_ALLOWED: Final = frozenset(
    f"{_CATALYST}{package}.{name}"
    for package, names in {
        "plans.logical": (
            "Aggregate", "Distinct", "Except", "Filter", "Generate", "GlobalLimit", "Intersect", "Join",
            "LateralJoin", "LimitAll", "LocalLimit", "LocalRelation", "Offset", "OneRowRelation",
            "PipeOperator", "Pivot", "Project", "Sample", "Sort", "SubqueryAlias", "Union", "UnresolvedHint",
            "UnresolvedWith", "Unpivot", "WithWindowDefinition",
            "DescribeRelation", "ShowColumns", "ShowTables",
        ),
        "analysis": (
            "CurrentNamespace$", "MultiAlias", "UnresolvedAlias", "UnresolvedAttribute",
            "UnresolvedExtractValue", "UnresolvedFunction", "UnresolvedGenerator", "UnresolvedHaving",
            "UnresolvedInlineTable", "UnresolvedNamedLambdaVariable", "UnresolvedRegex", "UnresolvedRelation",
            "UnresolvedStar", "UnresolvedStarExcept", "UnresolvedStarExceptOrReplace",
            "UnresolvedSubqueryColumnAliases", "UnresolvedTVFAliases", "UnresolvedTableOrView",
            "UnresolvedTableValuedFunction", "UnresolvedWindowExpression",
        ),
    }.items()
    for name in names
) | {
    "org.apache.spark.sql.execution.command.DescribeQueryCommand",
    "org.apache.spark.sql.execution.command.ExplainCommand",
}  # fmt: skip
_VALUES: Final = "LocalRelation"  # literal rows, which have no parts
_NODE: Final = f"{_CATALYST}trees.TreeNode"


class CheckedQuery(NamedTuple):
    """A query that may be executed."""

    plan: JavaObject
    tables: frozenset[str]
    """The tables in the query; all tables of the folder if it lists them."""


def read_only(spark: "SparkSession") -> "SparkSession":
    """A read-only session of the same application. Spark Connect has none."""
    _internals(spark)
    session = spark.newSession()
    for name, value in READ_ONLY.items():
        session.conf.set(name, value)
    return session


def checked(session: "SparkSession", query: str, tables: Collection[str]) -> CheckedQuery:
    """Parse a query, and refuse it unless every part is on an allow-list."""
    with _active(session) as internals:
        plan = internals.sessionState().sqlParser().parsePlan(query)
    check = _Check(session, tables)
    check.walk(plan)
    named = frozenset(tables) if check.lists_tables else frozenset(tables) & check.relations
    return CheckedQuery(plan, named)


def condition(session: "SparkSession", text: str) -> "Column":
    """A condition on the columns of one table. It may neither read other tables nor run code."""
    from pyspark.sql.classic.column import Column  # noqa: PLC0415 - lazy

    with _active(session) as internals:
        parsed = internals.sessionState().sqlParser().parseExpression(text)
    _Check(session, ()).walk(parsed)
    return Column(jvm_of(session).org.apache.spark.sql.classic.ExpressionUtils.column(parsed))


def execute(session: "SparkSession", query: CheckedQuery) -> "DataFrame":
    """The rows of a checked plan."""
    from pyspark.sql.classic.dataframe import DataFrame  # noqa: PLC0415 - lazy

    classic = jvm_of(session).org.apache.spark.sql.classic
    return DataFrame(classic.Dataset.ofRows(_internals(session), query.plan), session)


@cache
def functions() -> frozenset[str]:
    """The names of the functions that a query may call."""
    text = resources.files(__package__).joinpath("functions.txt").read_text()
    return frozenset(word for line in text.splitlines() if not line.startswith("# ") for word in line.split())


class _Check:
    """One walk over a parsed plan, its expressions and the plans within them."""

    def __init__(self, session: "SparkSession", tables: Collection[str]) -> None:
        self._gateway = session.sparkContext._gateway  # noqa: SLF001 - the only way to test a class
        self._tables = tables
        self._aliases: set[str] = set()  # of WITH
        self.relations: set[str] = set()
        self.lists_tables = False

    def walk(self, plan: JavaObject) -> None:
        """Check a plan or an expression, and all of its parts."""
        left: list[Any] = [plan]
        seen = 0
        while left:
            found = left.pop()
            if not isinstance(found, JavaObject):
                continue
            seen += 1
            if seen > PLAN_NODES_MAX:
                raise InvalidMessage(f"the query has more than {PLAN_NODES_MAX:,} parts")
            left += self._parts(found)
        self._need_tables()

    def _parts(self, found: JavaObject) -> Iterator[Any]:
        """Check one node; returns the parts to check next."""
        if self._is(found, _NODE):
            name = str(found.getClass().getName())
            self._need_allowed(name, found)
            if name.endswith(f".{_VALUES}"):
                return iter(())
        if self._is(found, "scala.collection.Iterable"):  # also a list, which is a pair of head and tail
            return _iterated(found.iterator())
        if self._is(found, "scala.Product"):
            return _iterated(found.productIterator())
        return iter(())

    def _is(self, found: JavaObject, kind: str) -> bool:
        return bool(is_instance_of(self._gateway, found, kind))

    def _need_allowed(self, name: str, node: JavaObject) -> None:
        kind = name.rpartition(".")[2]
        if name not in _ALLOWED and not name.startswith(_EXPRESSIONS):
            raise InvalidMessage(
                f"sql answers queries over the tables and changes nothing: {kind.rstrip('$')} is not allowed"
            )
        if kind == "UnresolvedRelation":
            self._relation(_names(node.multipartIdentifier()), has_options=not node.options().isEmpty())
        elif kind == "UnresolvedTableOrView":
            self._relation(_names(node.multipartIdentifier()), has_options=False)
        elif kind == "UnresolvedFunction":
            self._function(_names(node.nameParts()))
        elif kind == "UnresolvedTableValuedFunction":
            self._function(_names(node.name()))
        elif kind == "UnresolvedGenerator":
            self._function(str(node.name().unquotedString()).split("."))
        elif kind == "UnresolvedWith":
            self._aliases |= {str(alias).lower() for alias in _cte_names(node)}
        elif kind == "ShowTables":
            self.lists_tables = True

    def _function(self, parts: list[str]) -> None:
        name = ".".join(parts)
        if name.lower() not in functions():
            raise InvalidMessage(f"sql does not know a function {name}, or it may not be called here")

    def _relation(self, parts: list[str], *, has_options: bool) -> None:
        if len(parts) != 1 or has_options:  # a format and a path, another catalog, or options of a reader
            raise InvalidMessage(f"{'.'.join(parts)} is not a table of this folder")
        self.relations.add(parts[0].lower())

    def _need_tables(self) -> None:
        unknown = self.relations - self._aliases - {name.lower() for name in self._tables}
        if unknown:
            raise InvalidMessage(f"there is no table {min(unknown)} in this folder")


def _names(parts: JavaObject) -> list[str]:
    return [str(part) for part in _iterated(parts.iterator())]


def _cte_names(node: JavaObject) -> Iterator[str]:
    for relation in _iterated(node.cteRelations().iterator()):
        yield str(relation.productElement(0))


def _iterated(iterator: JavaObject) -> Iterator[Any]:
    while iterator.hasNext():
        yield iterator.next()


def _internals(session: "SparkSession") -> Any:
    """The session in the JVM, which has the parser. A client of Spark Connect has none."""
    found = getattr(session, "_jsparkSession", None)
    if found is None:
        raise InvalidSetting(
            "SQL is checked by Spark's own parser, which a Spark Connect client does not have"
        )
    return found


def _active(session: "SparkSession") -> AbstractContextManager[Any]:
    """The session in the JVM, made the active session of this thread."""
    return active_session(session, _internals(session))
