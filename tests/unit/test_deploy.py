"""The files in deploy/: they parse, and every command and option in them exists."""

import configparser
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from postroom.cli.main import cli

DEPLOY = Path(__file__).parents[2] / "deploy"
CONTAINER = DEPLOY / "Containerfile"
INSTRUCTIONS = {
    "CMD", "COPY", "EXPOSE", "FROM", "HEALTHCHECK", "RUN", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR",
}  # fmt: skip
COMPOSE = DEPLOY / "compose.yaml"
KUBERNETES = DEPLOY / "kubernetes" / "postroom.yaml"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
KINDS = {"Namespace", "Secret", "ConfigMap", "Deployment", "StatefulSet", "Service"}


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


@pytest.mark.parametrize("words", [pytest.param(words, id=name) for name, words in commands()])
def test_command_and_its_options_exist(words: list[str]) -> None:
    command: click.Command | None = cli
    while isinstance(command, click.Group):
        command = command.get_command(click.Context(command), words.pop(0))
    assert command is not None
    known = {name for parameter in command.params for name in parameter.opts}
    options = [word for word in words if word.startswith("--")]
    assert options
    assert set(options) <= known


def test_units_say_how_they_start_stop_and_are_installed() -> None:
    assert len(UNITS) == 2
    for path in UNITS:
        found = unit(path)
        assert {"Unit", "Service", "Install"} == set(found.sections())
        assert (found["Service"]["Restart"], found["Install"]["WantedBy"]) == ("always", "multi-user.target")


def test_container_file_is_well_formed_copies_what_exists_and_is_not_root() -> None:
    found = instructions()
    assert found[0][0] == "FROM"
    assert {word for word, _ in found} == INSTRUCTIONS
    assert all(rest for _, rest in found)
    for word, rest in found:
        for source in rest.split()[:-1] if word == "COPY" else ():
            assert (DEPLOY.parent / source).exists()
    assert [word for word, _ in found].index("USER") < [word for word, _ in found].index("CMD")
    check = dict(found)["HEALTHCHECK"].partition("CMD ")[2]
    compile(json.loads(check)[2], "the health check", "exec")


def test_every_deployment_starts_up() -> None:
    starts = [name for name, words in commands() if words[0] == "up"]
    assert starts == ["container", "compose server", "postroom-server.service", "kubernetes server"]


def test_manifest_has_known_kinds_and_its_pods_select_themselves() -> None:
    found = list(yaml.safe_load_all(KUBERNETES.read_text("utf-8")))
    assert {each["kind"] for each in found} == KINDS
    assert all(each["apiVersion"] in ("v1", "apps/v1") and each["metadata"]["name"] for each in found)
    for pod in pods():
        labels = pod["spec"]["template"]["metadata"]["labels"]
        assert pod["spec"]["selector"]["matchLabels"] == labels
        mounts = [
            each["name"] for each in pod["spec"]["template"]["spec"]["containers"][0].get("volumeMounts", ())
        ]
        assert mounts == [each["metadata"]["name"] for each in pod["spec"].get("volumeClaimTemplates", ())]


def test_compose_file_names_its_volumes_and_no_password() -> None:
    text = COMPOSE.read_text("utf-8")
    found = yaml.safe_load(text)
    used = {
        volume.partition(":")[0]
        for service in found["services"].values()
        for volume in service.get("volumes", ())
        if not volume.startswith(".")
    }
    assert used == set(found["volumes"])
    assert all(
        "@" in word and ":" not in word.partition("//")[2].partition("@")[0]
        for word in text.split()
        if word.startswith('"postgres://')
    )
