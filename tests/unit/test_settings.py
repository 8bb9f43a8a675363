"""Defaults < postroom.toml < environment, and clear errors for invalid values."""

from pathlib import Path

import pytest

from postroom import DEFAULT_BODY_THRESHOLD, Queue, Rejected
from postroom.errors import InvalidSetting, exit_code
from postroom.settings import (
    BusSettings,
    QueueSettings,
    described,
    load,
    queue_agent_id,
    queue_disabled,
    queue_root,
    queue_session,
)

HOME = {"HOME": "/home/me"}


def written(folder: Path, text: str) -> Path:
    file = folder / "postroom.toml"
    file.write_text(text)
    return file


def test_defaults() -> None:
    settings = load(None, HOME)
    assert settings.bus == BusSettings()
    assert settings.queue == QueueSettings(root=Path("/home/me/.local/share/postroom/queue"))
    assert settings.queue.body_threshold == DEFAULT_BODY_THRESHOLD


def test_the_file_overrides_defaults_and_its_paths_are_relative_to_it(tmp_path: Path) -> None:
    settings = load(
        written(
            tmp_path,
            '[bus]\npath = "runs/bus.yaml"\nlock_timeout_s = 3\npoll_interval_s = 0.5\nrotate_bytes = 1_000\n'
            'durability = "fsync"\n'
            '[queue]\nroot = "/var/q"\nsession = "s"\nagent_id = "a"\nbody_threshold = 0\ndisabled = true\n'
            'durability = "group"\n',
        ),
        HOME,
    )
    assert settings.bus == BusSettings(
        path=tmp_path / "runs/bus.yaml",
        lock_timeout_s=3.0,
        poll_interval_s=0.5,
        rotate_bytes=1000,
        durability="fsync",
    )
    assert settings.queue == QueueSettings(
        root=Path("/var/q"), session="s", agent_id="a", body_threshold=0, disabled=True, durability="group"
    )


def test_a_home_folder_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/other")
    assert load(written(tmp_path, '[queue]\nroot = "~/q"\n'), HOME).queue.root == Path("/home/other/q")


def test_the_environment_overrides_the_file(tmp_path: Path) -> None:
    file = written(
        tmp_path, '[bus]\npath = "b"\nrotate_bytes = 5\n[queue]\nroot = "q"\nsession = "s"\ndisabled = 1\n'
    )
    settings = load(
        file,
        {
            "POSTROOM_BUS": "other",
            "POSTROOM_BUS_LOCK_TIMEOUT_S": "2.5",
            "POSTROOM_BUS_POLL_INTERVAL_S": "1",
            "POSTROOM_BUS_DURABILITY": "group",
            "ZOS_MQ_ROOT": "zos",
            "ZOS_MQ_DISABLED": "0",
            "POSTROOM_QUEUE_DURABILITY": "fsync",
        },
    )
    assert settings.bus == BusSettings(
        path=Path("other"), lock_timeout_s=2.5, poll_interval_s=1.0, rotate_bytes=5, durability="group"
    )
    assert settings.queue == QueueSettings(root=Path("zos"), session="s", durability="fsync")


def test_queue_root_follows_the_order_of_variables() -> None:
    environ = {
        "POSTROOM_QUEUE_ROOT": "1",
        "ZOS_MQ_ROOT": "2",
        "ZOS_HOME": "3",
        "XDG_DATA_HOME": "/4",
        "HOME": "/5",
    }
    expected = ["1", "2", "3/agent-mq", "/4/postroom/queue", "/5/.local/share/postroom/queue"]
    for variable, folder in zip(list(environ), expected, strict=True):
        assert queue_root(environ) == Path(folder)
        assert load(None, environ).queue.root == Path(folder)
        del environ[variable]
    assert queue_root({"XDG_DATA_HOME": "relative", **HOME}).is_relative_to("/home/me")


def test_without_a_home_the_folder_must_be_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def homeless() -> Path:
        raise RuntimeError

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(InvalidSetting, match="POSTROOM_QUEUE_ROOT"):
        queue_root({})
    for variable in ("HOME", "XDG_DATA_HOME", "ZOS_HOME", "ZOS_MQ_ROOT", "POSTROOM_QUEUE_ROOT"):
        monkeypatch.delenv(variable, raising=False)
    assert Queue(tmp_path).root == tmp_path


def test_argument_overrides_an_invalid_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("POSTROOM_QUEUE_BODY_THRESHOLD", "-1")
    assert Queue(tmp_path, 5).body_threshold == 5
    with pytest.raises(InvalidSetting, match="POSTROOM_QUEUE_BODY_THRESHOLD"):
        Queue(tmp_path)


def test_postroom_variables_override_zos_variables() -> None:
    for key in ("ROOT", "SESSION", "AGENT_ID", "BODY_THRESHOLD", "DISABLED"):
        both = {f"ZOS_MQ_{key}": "0", f"POSTROOM_QUEUE_{key}": "1", **HOME}
        only_theirs = {f"ZOS_MQ_{key}": "1", f"POSTROOM_QUEUE_{key}": "", **HOME}  # empty is not set
        assert str(getattr(load(None, both).queue, key.lower())) in ("1", "True")
        assert str(getattr(load(None, only_theirs).queue, key.lower())) in ("1", "True")


def test_queue_lookups_read_the_environment() -> None:
    assert (queue_disabled({}), queue_session({}), queue_agent_id({})) == (False, "default", "anonymous")
    environ = {"ZOS_MQ_DISABLED": "1", "ZOS_MQ_SESSION": "s", "ZOS_MQ_AGENT_ID": "a"}
    assert (queue_disabled(environ), queue_session(environ), queue_agent_id(environ)) == (True, "s", "a")
    assert queue_disabled({**environ, "POSTROOM_QUEUE_DISABLED": "0"}) is False
    with pytest.raises(InvalidSetting, match="ZOS_MQ_DISABLED must be 1 or 0"):
        queue_disabled({"ZOS_MQ_DISABLED": "perhaps"})


BAD_VARIABLES = {
    "POSTROOM_BUS": "a\0b",
    "POSTROOM_BUS_LOCK_TIMEOUT_S": "inf",
    "POSTROOM_BUS_POLL_INTERVAL_S": "0",
    "POSTROOM_BUS_ROTATE_BYTES": "10MB",
    "POSTROOM_BUS_DURABILITY": "always",
    "POSTROOM_QUEUE_BODY_THRESHOLD": "-1",
    "ZOS_MQ_BODY_THRESHOLD": "\udcff",
    "ZOS_MQ_DISABLED": "maybe",
}


@pytest.mark.parametrize("variable", BAD_VARIABLES)
def test_a_bad_variable_is_named(variable: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        load(None, {variable: BAD_VARIABLES[variable], **HOME})
    assert str(caught.value).startswith(f"{variable} must be ")
    assert repr(BAD_VARIABLES[variable]) in str(caught.value)
    assert isinstance(caught.value, Rejected | ValueError)
    assert exit_code(caught.value) == 2


BAD_FILES = {
    "[bus]\nlock_timeout_s = 0\n": "bus.lock_timeout_s must be a number",
    "[bus]\nlock_timeout_s = nan\n": "bus.lock_timeout_s must be a number",
    '[bus]\nlock_timeout_s = "3"\n': "bus.lock_timeout_s must be a number",
    "[bus]\nrotate_bytes = 1.5\n": "bus.rotate_bytes must be a whole number",
    "[bus]\npath = 3\n": "bus.path must be a path",
    '[bus]\npath = ""\n': "bus.path must be a path",
    '[queue]\ndurability = "never"\n': "queue.durability must be os, group or fsync",
    "[queue]\nbody_threshold = true\n": "queue.body_threshold must be",
    "[queue]\ndisabled = 2\n": "queue.disabled must be",
    "[queue]\nroots = 1\n": "unknown key 'queue.roots'; known are queue.root, ",
    "[mail]\n": "unknown key 'mail'; known are bus, queue",
    "bus = 3\n": "bus must be a table",
    "[bus\n": "is not TOML",
}


@pytest.mark.parametrize("text", BAD_FILES)
def test_a_bad_file_is_named_with_its_key(tmp_path: Path, text: str) -> None:
    file = written(tmp_path, text)
    with pytest.raises(InvalidSetting) as caught:
        load(file, HOME)
    assert str(caught.value).startswith(str(file))
    assert BAD_FILES[text] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match=r"cannot read .*: No such file"):
        load(tmp_path / "missing.toml", HOME)
    (tmp_path / "binary.toml").write_bytes(b"\xff")
    with pytest.raises(InvalidSetting, match="is not TOML"):
        load(tmp_path / "binary.toml", HOME)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\xff", r"is not TOML: byte 0 \(0xff\) is not UTF-8 text"),
        (b"a = " + b"[" * 50_000, "it is nested too deeply"),
    ],
)
def test_a_file_of_the_wrong_kind_is_one_plain_sentence(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "postroom.toml").write_bytes(content)
    with pytest.raises(InvalidSetting, match=says) as refused:
        load(tmp_path / "postroom.toml", {})
    assert "codec" not in str(refused.value)


def test_every_setting_is_described() -> None:
    for table in (BusSettings, QueueSettings):
        for setting in described(table):
            assert setting.description.endswith(".")
            assert setting.wants
            assert all(variable.isupper() for variable in setting.variables)
            assert setting.variables[0].startswith("POSTROOM_")
