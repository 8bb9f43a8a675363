"""`make structure`: figures about the structure of `src/`, as one table.

They describe what a reader meets: files in a folder, helpers with one caller, import circles, classes with
many methods. Imports for the type checker count.
"""

import ast
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

SMALL_LINES = 120  # a module below this that one other imports may be a part of it

Function = ast.FunctionDef | ast.AsyncFunctionDef


def main(roots: list[str]) -> int:
    columns = [dict(figures(Path(root))) for root in roots or ["src"]]
    for name in columns[0]:
        print(" | ".join([name, *(column[name] for column in columns)]))
    return 0


def figures(root: Path) -> Iterator[tuple[str, str]]:
    texts = {path: path.read_text() for path in sorted(root.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    functions = [node for node in nodes if isinstance(node, Function)]
    lengths = sorted((node.end_lineno or 0) - node.lineno + 1 for node in functions)
    yield "lines", f"{sum(text.count(chr(10)) for text in texts.values()):,}"
    yield "files", str(len(texts))
    yield "functions", f"{len(functions):,}"
    yield (
        "lines of a function: median, 90th percentile",
        (f"{statistics.median(lengths):.0f}, {lengths[len(lengths) * 9 // 10]}"),
    )
    share = len(list(one_caller_helpers(functions, nodes))) / len(functions)
    yield "private helpers with one caller", f"{share:.1%} of functions"
    folders = Counter(path.parent for path in texts if path.name != "__init__.py")
    yield "modules of the largest folder", str(max(folders.values()))
    imports = imported(root, trees)
    circles = list(import_circles(imports))
    yield (
        "import circles: number, files of the largest",
        f"{len(circles)}, {max(map(len, circles), default=0)}",
    )
    importers = Counter(target for targets in imports.values() for target in targets)
    small = [name for name, path in modules(root, trees).items() if texts[path].count("\n") < SMALL_LINES]
    yield (
        f"modules below {SMALL_LINES} lines with one importer",
        str(sum(importers[name] == 1 for name in small)),
    )
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    count = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    yield "class names that stand for two classes", str(sum(number > 1 for number in count.values()))
    yield "methods of the largest class", str(max(own_methods(node) for node in classes.values()))
    lines = {name: ancestry(name, classes) for name in classes}
    yield (
        "with inherited ones",
        str(max(sum(own_methods(classes[one]) for one in line) for line in lines.values())),
    )
    yield "postroom classes in the longest MRO", str(max(map(len, lines.values())))


def one_caller_helpers(functions: Iterable[Function], nodes: Iterable[ast.AST]) -> Iterator[Function]:
    """Functions with a private name that stands once in the code, apart from their definition."""
    mentions = Counter(
        node.id if isinstance(node, ast.Name) else node.attr
        for node in nodes
        if isinstance(node, ast.Name | ast.Attribute)
    )
    for function in functions:
        if (
            function.name.startswith("_")
            and not function.name.startswith("__")
            and mentions[function.name] == 1
        ):
            yield function


def modules(root: Path, paths: Iterable[Path]) -> dict[str, Path]:
    names = {path: ".".join(path.relative_to(root).with_suffix("").parts) for path in paths}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


def imported(root: Path, trees: Mapping[Path, ast.Module]) -> dict[str, set[str]]:
    """The modules that each module imports, wherever the import stands."""
    named = modules(root, trees)
    found: dict[str, set[str]] = {}
    for name, path in named.items():
        found[name] = set()
        for node in ast.walk(trees[path]):
            if isinstance(node, ast.Import):
                found[name] |= {alias.name for alias in node.names} & named.keys()
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    found[name] |= {full if full in named else node.module} & named.keys()
        found[name].discard(name)
    return found


def import_circles(imports: Mapping[str, set[str]]) -> Iterator[set[str]]:
    """Sets of modules that import each other, directly or through others."""
    reach = {name: reachable(name, imports) for name in imports}
    seen: set[str] = set()
    for name, targets in reach.items():
        if name in targets and name not in seen:
            circle = {other for other in targets if name in reach[other]}
            seen |= circle
            yield circle


def reachable(start: str, imports: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    ahead = set(imports[start])
    while ahead:
        name = ahead.pop()
        found.add(name)
        ahead |= imports[name] - found
    return found


def own_methods(node: ast.ClassDef) -> int:
    return sum(isinstance(part, Function) for part in node.body)


def ancestry(name: str, classes: Mapping[str, ast.ClassDef]) -> set[str]:
    """A class and its bases within the code, by name."""
    found: set[str] = set()
    ahead = {name}
    while ahead:
        one = ahead.pop()
        found.add(one)
        bases = [base.value if isinstance(base, ast.Subscript) else base for base in classes[one].bases]
        names = {base.id if isinstance(base, ast.Name) else getattr(base, "attr", "") for base in bases}
        ahead |= (names & classes.keys()) - found
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
