"""Every bench of the mail server runs, at a size that measures nothing, and yields whole figures."""

import json

import bench_mail
import figures as shared
import pytest
from mailbench import mail
from mailbench.sizes import SMALL


@pytest.mark.parametrize("bench", bench_mail.BENCHES, ids=lambda bench: bench.__name__)
def test_a_bench_yields_figures_with_a_value_and_a_verdict(
    bench: bench_mail.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "REPEATS", 1)
    monkeypatch.setattr(mail, "MAILBOX_TTL_S", 0.2)
    found = [json.loads(figure.as_json()) for figure in bench(SMALL)]
    assert found
    for figure in found:
        assert figure["value"] > 0
        assert (figure["ratio"] is None) == (figure["against"] is None)
        assert isinstance(figure["ok"], bool) == (figure["goal"] is not None)
