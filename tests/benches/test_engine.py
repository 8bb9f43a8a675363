"""Every part of the engine's bench runs, at a size that measures nothing, and yields whole figures."""

import json
import time
from contextlib import nullcontext
from pathlib import Path

import bench_engine
import pytest
from enginebench import finish, latency
from enginebench.engines import open_engine, url_in
from enginebench.sizes import QUICK
from peersbench import brokers

from postroom.stores.base import ByIds
from tests.rabbitmqserver import HOST, RabbitServer


@pytest.fixture
def shared_broker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bench uses the RabbitMQ of all tests. `test_peers` starts one as a bench does."""

    def broker(_: Path) -> nullcontext[str]:
        rabbit: RabbitServer = request.getfixturevalue("rabbit")
        return nullcontext(f"amqp://guest:guest@{HOST}:{rabbit.port}//")

    monkeypatch.setattr(brokers, "rabbitmq", broker)


@pytest.mark.statement("throughput")
@pytest.mark.usefixtures("shared_broker")
@pytest.mark.parametrize("part", bench_engine.BENCHES)
def test_part_yields_figures_with_a_value_and_a_verdict(part: str, tmp_path: Path) -> None:
    found = [json.loads(figure.as_json()) for figure in bench_engine.BENCHES[part](tmp_path, QUICK)]
    assert found
    assert len({figure["name"] for figure in found}) == len(found)
    for figure in found:
        assert figure["value"] > 0
        assert isinstance(figure["ok"], bool) == (figure["goal"] is not None)


def test_message_submitted_with_the_slow_clock_has_waited_for_a_minute(tmp_path: Path) -> None:
    url = url_in(tmp_path)
    latency._submit_aged(url, 1)
    with open_engine(url) as engine:
        [event, *_] = engine.store.events()
        [record] = engine.store.find(ByIds((event.message_id,)))
        assert engine.store.steady_ns() - record.ready_at >= latency.AGE_S * 1e9


def test_run_is_finished_when_each_message_was_handled_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(finish.FOLDER, str(tmp_path))
    for number in (0, 0, 1):
        assert not (tmp_path / "run").exists()
        finish.note("run", number, 2)
    assert finish.wait(tmp_path, "run") <= time.perf_counter()
