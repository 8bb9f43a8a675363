"""The files in deploy/: they parse, and every command and option in them exists."""

import json
import re

import click
import pytest
import yaml

from postroom.cli.main import cli
from tests.deployfiles import COMPOSE, DEPLOY, KUBERNETES, UNITS, commands, instructions, pods, unit

INSTRUCTIONS = {
    "CMD", "COPY", "EXPOSE", "FROM", "HEALTHCHECK", "RUN", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR",
}  # fmt: skip
KINDS = {"Namespace", "Secret", "ConfigMap", "Deployment", "StatefulSet", "Service"}


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


def test_pods_run_as_the_user_of_the_image_and_can_write_to_their_volumes() -> None:
    [user] = re.findall(r"useradd --uid (\d+)", dict(instructions())["RUN"])
    for pod in pods():
        spec = pod["spec"]["template"]["spec"]
        context = spec["securityContext"]
        assert (context["runAsNonRoot"], context["runAsUser"]) == (True, int(user))
        [container] = spec["containers"]
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        if container.get("volumeMounts"):  # a new volume belongs to root
            assert context["fsGroup"] == int(user)


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
