"""Each parser on some mutated inputs. `make fuzz` tries a million of each."""

from pathlib import Path

import pytest

from tests.fuzz import fuzzer
from tests.fuzz.targets import TARGETS, Target, Wrong

SEED = 20_261_115  # the same inputs every time; `make fuzz` takes new ones
INPUTS = 5_000
INPUTS_OF_SLOW_ONES = {
    "bus-foreign": 700,
    "bus-records": 1_500,
    "bus-legacy": 2_500,
    "yaml-header": 1_500,
    "cursor-files": 300,
    "journal": 200,
    "mail-log": 800,
    "mail-calls": 3_000,
    "settings-toml": 500,
}
"""They parse YAML or write files for every input, and `make test` has to end."""


@pytest.mark.parametrize("name", TARGETS)
def test_no_input_crashes_a_parser_or_makes_it_do_something_wrong(name: str) -> None:
    figures = fuzzer.run(name, SEED, range(INPUTS_OF_SLOW_ONES.get(name, INPUTS)))
    print(f"python -m tests.fuzz.run --only {name} --seed {SEED} --count {figures.inputs}")
    assert figures.ok, figures.failures[0]


# ---- the harness itself can fail -------------------------------------------------------------------


class Fragile(Target):
    corpus = (b"0123456789",)

    def check(self, data: bytes) -> None:
        if b"\xff" in data:
            raise Wrong("an 0xff was let through")
        data.decode()


def test_crashes_and_wrong_results_are_counted_and_can_be_repeated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(TARGETS, "fragile", Fragile)
    figures = fuzzer.run("fragile", 1, range(2_000))
    assert figures.crashes > 0
    assert figures.wrong > 0
    assert not figures.ok
    for failure in figures.failures:
        again = fuzzer.run("fragile", failure.seed, range(failure.number, failure.number + 1))
        assert again.failures == [failure]
    saved = fuzzer.save(figures.failures[0], tmp_path / "deep").read_text()
    assert figures.failures[0].input in saved
    assert f"--first {figures.failures[0].number} --count 1" in saved
