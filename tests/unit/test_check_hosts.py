"""`make check` refuses hosts of package registries in tracked files."""

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_hosts", ROOT / "tools" / "check_hosts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check_hosts = _loaded()


@pytest.mark.parametrize(
    "parts",
    [
        ("pypi", "org"), ("test.pypi", "org"), ("files.pythonhosted", "org"), ("pypi", "python.org"),
        ("registry.npmjs", "org"), ("www.npmjs", "com"), ("static.crates", "io"), ("repo1.maven", "org"),
        ("repo.maven", "apache.org"), ("index.docker", "io"), ("hub.docker", "com"), ("ghcr", "io"),
        ("quay", "io"), ("europe-docker.pkg", "dev"), ("PyPI", "Org"), ("index.rubygems", "org"),
    ],
)  # fmt: skip
def test_host_of_a_registry_is_found_with_its_line(parts: tuple[str, str]) -> None:
    host = ".".join(parts)
    found = check_hosts.found_in(f"one\ntwo https://{host}/simple\n".encode())
    assert [line for line, _ in found] == [2]


@pytest.mark.parametrize(
    "text",
    [
        "twine -p pypi-AgEI", "install its wheel from PyPI", "https://my-" + "pypi" + ".organic/", "maven",
        "npm" + "js.orgs", "docker" + ".io.example", "registry.example.com", "crates" + ".iota",
    ],
)  # fmt: skip
def test_other_names_are_not_refused(text: str) -> None:
    assert check_hosts.found_in(text.encode()) == []


def test_tracked_and_new_files_are_checked_and_ignored_ones_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    (tmp_path / ".gitignore").write_text("ignored\n")
    (tmp_path / "ignored").write_text("https://" + "pypi" + ".org")
    (tmp_path / "kept.md").write_text("nothing\n")
    assert check_hosts.main(tmp_path) == 0
    (tmp_path / "page.md").write_text("\n\nsee https://" + "pypi" + ".org/project/x\n")
    assert check_hosts.main(tmp_path) == 1
    host = "pypi" + ".org"
    assert capsys.readouterr().err == (f"page.md:3: {host} is the host of a package registry: leave it out\n")


def test_the_repository_names_no_host_of_a_registry() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "tools/check_hosts.py" in makefile
    assert check_hosts.main() == 0
