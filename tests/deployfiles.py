"""The files in deploy/, and the commands in them."""

import configparser
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[1] / "deploy"
CONTAINER = DEPLOY / "Containerfile"
COMPOSE = DEPLOY / "compose.yaml"
KUBERNETES = DEPLOY / "kubernetes" / "postroom.yaml"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))


def unit(path: Path) -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(strict=True)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(path.read_text("utf-8"))
    return parser


def pods() -> Iterator[dict[str, Any]]:
    for each in yaml.safe_load_all(KUBERNETES.read_text("utf-8")):
        if each["kind"] in ("Deployment", "StatefulSet"):
            yield each


def instructions() -> list[tuple[str, str]]:
    """The instructions of the container file with their arguments."""
    lines = [line for line in CONTAINER.read_text("utf-8").splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def commands() -> Iterator[tuple[str, list[str]]]:
    yield "container", json.loads(dict(instructions())["CMD"])[1:]
    for name, service in yaml.safe_load(COMPOSE.read_text("utf-8"))["services"].items():
        if service["command"][0] == "postroom":
            yield f"compose {name}", service["command"][1:]
    for path in UNITS:
        yield path.name, shlex.split(unit(path)["Service"]["ExecStart"])[1:]
    for pod in pods():
        [container] = pod["spec"]["template"]["spec"]["containers"]
        yield f"kubernetes {pod['metadata']['name']}", container["command"][1:]


def dashboard_queries() -> list[str]:
    """The queries of the dashboard: those of its panels and of its variables."""
    dashboard = json.loads((DEPLOY / "grafana" / "postroom.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return queries + [one["query"] for one in dashboard["templating"]["list"] if one["type"] == "query"]
