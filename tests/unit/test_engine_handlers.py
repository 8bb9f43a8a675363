"""Pages of the stream of an answer."""

from postroom.engine.agents.answer_parts import Position
from postroom.engine.rules.cells import Part
from postroom.server.routes.engine_handlers import stream_page
from postroom.server.routes.event_streams import STREAM_PAGE_BYTES_MAX

CHUNK = "x" * (STREAM_PAGE_BYTES_MAX // 4)
PARTS = [
    (Position(1, 1, index, index + 1), Part("m", "stream_chunk", "", chunk=CHUNK, chunk_index=index))
    for index in range(10)
]


def test_a_page_of_large_parts_ends_when_it_is_full() -> None:
    data, reached = stream_page(PARTS, Position(), is_complete=True)
    assert STREAM_PAGE_BYTES_MAX <= len(data) < STREAM_PAGE_BYTES_MAX + 2 * len(CHUNK)
    assert reached == PARTS[3][0]


def test_the_last_page_ends_the_stream_when_the_answer_is_complete() -> None:
    assert stream_page(PARTS[:2], Position(), is_complete=True)[1] is None
    assert stream_page(PARTS[:2], Position(), is_complete=False)[1] == PARTS[1][0]
    assert stream_page([], Position(3), is_complete=False) == (b"", Position(3))
