import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.core.nats import natswire as wire

CLIENT = (
    b'CONNECT {"verbose":false}\r\nPING\r\nSUB a.* 1\r\nSUB b g 2\r\nPUB a.b 3\r\na\r\n\r\n'
    b"PUB a.b in.box 2\r\nhi\r\nHPUB a.b 12 14\r\nNATS/1.0\r\n\r\nhi\r\nUNSUB 1 5\r\nUNSUB 2\r\n"
    b"PONG\r\n+OK\r\n"
)
SERVER = (
    b'INFO {"headers":true} \r\nPONG\r\nMSG a.b 1 3\r\na\r\n\r\nMSG a.b 1 in.box 2\r\nhi\r\n'
    b"HMSG a.b 1 12 14\r\nNATS/1.0\r\n\r\nhi\r\nHMSG a 2 r 12 12\r\nNATS/1.0\r\n\r\n\r\n+OK\r\n"
    b"-ERR 'Stale Connection'\r\nPING\r\n"
)


def flat(commands: list[wire.Command]) -> list[object]:
    """Frames one by one, whether or not they were read as a run."""
    found: list[object] = []
    for command in commands:
        if isinstance(command, wire.Messages):
            assert command.bodies
            found += [(sized(command.head, len(body)), body) for body in command.bodies]
        else:
            found.append(command)
    return found


def sized(head: wire.ControlLine, size: int) -> wire.ControlLine:
    """The head of one frame. For bodies of several sizes the reader returns one head for all."""
    if head.size != wire.ANY_SIZE:
        return head
    before, after = b"", b""
    if head.before_sid:
        before, after = wire.message_line(head.subject, head.reply, head.header_bytes, size)
        assert (before, after.rpartition(b" ")[0] + b" ") == (head.before_sid, head.after_sid)
    return wire.ControlLine(head.subject, head.reply, head.header_bytes, size, head.sid, before, after)


def read(data: bytes, *, step: int = 1 << 30, reader: wire.ClientReader | None = None) -> list[object]:
    reader = reader or wire.ClientReader()
    commands: list[wire.Command] = []
    for start in range(0, len(data), step):
        commands += reader.feed(data[start : start + step])
    return flat(commands)


def published(
    subject: bytes, body: bytes, reply: bytes = b"", header_bytes: int = -1
) -> tuple[wire.ControlLine, bytes]:
    before, after = wire.message_line(subject, reply, header_bytes, len(body))
    return wire.ControlLine(subject, reply, header_bytes, len(body), b"", before, after), body


def test_commands_of_a_client_are_parsed() -> None:
    assert read(CLIENT) == [
        wire.Connect(b'{"verbose":false}'),
        wire.Ping(),
        wire.Subscribe(b"a.*", b"", b"1"),
        wire.Subscribe(b"b", b"g", b"2"),
        published(b"a.b", b"a\r\n"),
        published(b"a.b", b"hi", b"in.box"),
        published(b"a.b", b"NATS/1.0\r\n\r\nhi", header_bytes=12),
        wire.Unsubscribe(b"1", 5),
        wire.Unsubscribe(b"2", 0),
        wire.Pong(),
        wire.Okay(),
    ]


def test_commands_of_a_server_are_parsed() -> None:
    assert flat(wire.ServerReader().feed(SERVER)) == [
        wire.Info(b'{"headers":true}'),
        wire.Pong(),
        (wire.ControlLine(b"a.b", b"", -1, 3, b"1"), b"a\r\n"),
        (wire.ControlLine(b"a.b", b"in.box", -1, 2, b"1"), b"hi"),
        (wire.ControlLine(b"a.b", b"", 12, 14, b"1"), b"NATS/1.0\r\n\r\nhi"),
        (wire.ControlLine(b"a", b"r", 12, 12, b"2"), b"NATS/1.0\r\n\r\n"),
        wire.Okay(),
        wire.Error("Stale Connection"),
        wire.Ping(),
    ]


@pytest.mark.parametrize("step", range(1, len(CLIENT)))
def test_chunking_does_not_change_the_commands_of_a_client(step: int) -> None:
    assert read(CLIENT, step=step) == read(CLIENT)


@pytest.mark.parametrize("step", [1, 2, 3, 7, 50])
def test_chunking_does_not_change_the_commands_of_a_server(step: int) -> None:
    reader = wire.ServerReader()
    pieces = [SERVER[start : start + step] for start in range(0, len(SERVER), step)]
    assert flat([command for piece in pieces for command in reader.feed(piece)]) == flat(
        wire.ServerReader().feed(SERVER)
    )


@pytest.mark.parametrize("commands_max", [1, 2, 5])
@pytest.mark.parametrize("kept", [0, 1, 30, len(CLIENT)])
def test_a_reader_that_stops_early_continues_with_the_next_command(commands_max: int, kept: int) -> None:
    reader = wire.ClientReader()
    reader.keep(CLIENT[:kept])
    commands = reader.feed(CLIENT[kept:], commands_max)
    assert len(commands) == commands_max
    assert 0 < reader.held_bytes < len(CLIENT)
    while reader.has_more:
        more = reader.feed(b"", commands_max)
        assert len(more) <= commands_max
        commands += more
    assert flat(commands) == read(CLIENT)


def test_what_is_kept_after_a_completed_frame_is_read_however_short_it_is() -> None:
    reader = wire.ClientReader()
    frame = b"PUB a 100\r\n" + b"x" * 100 + b"\r\n"
    assert reader.feed(frame[:50]) == []
    assert len(reader.feed(frame[50:])) == 1
    reader.keep(b"PING\r\n")
    assert reader.feed() == [wire.Ping()]


FRAME = st.tuples(
    st.sampled_from([b"a", b"b"]), st.sampled_from([b"", b"x", b"PUB a 1\r\n", b"\r\nPUB b 0\r\n"])
)


@given(st.lists(st.tuples(FRAME, st.integers(1, 40)), max_size=8), st.integers(1, 2000))
def test_runs_of_equal_frames_keep_every_frame_in_order(
    runs: list[tuple[tuple[bytes, bytes], int]], step: int
) -> None:
    frames = [frame for frame, times in runs for _ in range(times)]
    data = b"".join(wire.publish(subject, body) for subject, body in frames)
    assert read(data, step=step) == [published(subject, body) for subject, body in frames]


def test_a_burst_is_one_command() -> None:
    bodies = [b"%04d" % number for number in range(3_000)]
    [messages] = wire.ClientReader().feed(b"".join(wire.publish(b"a", body) for body in bodies))
    assert isinstance(messages, wire.Messages)
    assert messages.bodies == bodies


MIXED_BODIES = [b"x" * (number % 7) for number in range(600)]


def test_bodies_of_several_sizes_to_one_subject_are_few_commands() -> None:
    data = b"".join(wire.publish(b"a", body) for body in MIXED_BODIES)
    reader = wire.ClientReader()
    reader.feed(data)  # from here on the reader has cached the lines
    commands = reader.feed(data)
    assert len(commands) <= 5
    assert flat(commands) == [published(b"a", body) for body in MIXED_BODIES]


@given(
    st.lists(
        st.tuples(
            st.sampled_from([b"a", b"b"]), st.integers(0, 5), st.sampled_from([b"", b"r"]), st.booleans()
        ),
        min_size=20,
        max_size=80,
    ),
    st.sampled_from([b"", b"PUB a 2\r\nxyz", b"PUB a 5\r\nxx\r\ny\r\n", b"PING\r\n", b"PUB b 2\nxx\r\n"]),
    st.integers(0, 80),
)
def test_rows_of_several_sizes_lose_and_mix_nothing(
    frames: list[tuple[bytes, int, bytes, bool]], odd: bytes, at: int
) -> None:
    pieces = [
        wire.publish(subject, b"x" * size, reply=reply, headers=b"NATS/1.0\r\n\r\n" if headed else b"")
        for subject, size, reply, headed in frames
    ]
    data = b"".join([*pieces[:at], odd, *pieces[at:]])
    read(b"".join(pieces))  # all lines are cached
    assert read(data) == read(data, step=1)


def test_a_row_of_several_sizes_is_forwarded_like_single_messages() -> None:
    data = b"".join(wire.publish(b"a", body) for body in MIXED_BODIES)
    reader = wire.ClientReader()
    reader.feed(data)
    commands = [each for each in reader.feed(data) if isinstance(each, wire.Messages)]
    assert any(each.head.size == wire.ANY_SIZE for each in commands)
    found = b"".join(wire.forwarded(each.head, each.bodies, b"7", with_headers=True) for each in commands)
    assert found == b"".join(wire.messages(b"a", b"7", b"", [(b"", body)]) for body in MIXED_BODIES)


def test_a_run_that_breaks_yields_the_frames_before_it() -> None:
    good, bad = wire.publish(b"a", b"four"), b"PUB a 4\r\nfour!\n"
    found = read(good * 500 + bad + good * 500)
    assert found == [published(b"a", b"four")] * 500 + [wire.ProtocolFault(wire.UNKNOWN_OPERATION)]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"PUB a 101\r\n", wire.PAYLOAD_TOO_LARGE),
        (b"PUB a 101\r\n%b\r\n" % (b"x" * 101), wire.PAYLOAD_TOO_LARGE),
        (b"HPUB a 12 101\r\n", wire.PAYLOAD_TOO_LARGE),
        (b"PUB a 9999999999\r\n", wire.UNKNOWN_OPERATION),
        (b"S" * wire.CONTROL_LINE_BYTES_MAX, wire.LINE_TOO_LONG),
        (b"PUB " + b"S" * wire.CONTROL_LINE_BYTES_MAX, wire.LINE_TOO_LONG),
        (b"CONNECT {" + b" " * wire.CONNECT_BYTES_MAX, wire.LINE_TOO_LONG),
        (b"HPUB a 3 2\r\nxx\r\n", wire.UNKNOWN_OPERATION),
        (b"PUB a 1\r\nxy\r\n", wire.UNKNOWN_OPERATION),
        (b"-ERR 'x'\r\n", wire.UNKNOWN_OPERATION),
        (b"\n", wire.UNKNOWN_OPERATION),
    ],
)
def test_a_protocol_violation_yields_a_fault_and_ends_the_stream(data: bytes, text: str) -> None:
    for step in (1, 1 << 30):
        reader = wire.ClientReader(payload_bytes_max=100)
        assert read(b"PING\r\n" + data, step=step, reader=reader) == [wire.Ping(), wire.ProtocolFault(text)]
        assert reader.feed(b"PING\r\n") == []


def test_nothing_is_kept_beyond_one_frame() -> None:
    reader = wire.ClientReader(payload_bytes_max=1000)
    for _ in range(300):
        reader.feed(b"PUB a 1000\r\n" + b"x" * 500)
        assert len(reader._held) <= 1000 + wire.CONTROL_LINE_BYTES_MAX
        reader.feed(b"x" * 500 + b"\r\n")
        assert len(reader._held) == 0


def test_control_lines_are_not_kept_forever() -> None:
    reader = wire.ClientReader()
    reader._heads.clear()
    for number in range(wire.HEADS_KEPT_MAX + 10):
        assert len(read(b"PUB in.%d 1\r\nx\r\n" % number, reader=reader)) == 1
        assert len(reader._heads) <= wire.HEADS_KEPT_MAX


def test_a_connect_line_is_never_cached() -> None:
    reader = wire.ClientReader()
    read(b'CONNECT {"pass":"secret"}\r\nPUB a 1\r\nx\r\n', reader=reader)
    assert not any(b"secret" in line for line in reader._heads)


# ---- CONNECT -----------------------------------------------------------------------------------------


def test_missing_connect_options_have_defaults() -> None:
    options = wire.connect_options(b"{}")
    assert options.verbose
    assert options.echo
    assert not options.headers
    assert not options.no_responders
    assert options.name == options.user == options.password == options.auth_token == ""


def test_connect_options_are_decoded() -> None:
    options = wire.connect_options(
        b'{"verbose":false,"name":"n","user":"u","pass":"p","new":[1],"headers":true}'
    )
    assert (options.verbose, options.name, options.user, options.password, options.headers) == (
        False,
        "n",
        "u",
        "p",
        True,
    )


@pytest.mark.parametrize("options", [b"", b"{", b"[]", b'{"verbose":1}', b'{"name":"\xff"}', b"[" * 5000])
def test_invalid_connect_options_are_refused(options: bytes) -> None:
    with pytest.raises(wire.ProtocolBroken):
        wire.connect_options(options)


# ---- writing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_headers", [True, False])
@pytest.mark.parametrize("count", [1, 2, 50])
@pytest.mark.parametrize("headers", [b"", b"NATS/1.0\r\nK: v\r\n\r\n"])
@pytest.mark.parametrize("reply", [b"", b"in.box"])
def test_a_published_message_round_trips_through_a_server(
    reply: bytes, headers: bytes, count: int, with_headers: bool
) -> None:
    sent = wire.publish(b"a.b", b"hello", reply=reply, headers=headers) * count
    [messages] = wire.ClientReader().feed(sent)
    assert isinstance(messages, wire.Messages)
    passed = wire.forwarded(messages.head, messages.bodies, b"7", with_headers=with_headers)
    given_headers = headers if with_headers else b""
    assert passed == wire.messages(b"a.b", b"7", reply, [(given_headers, b"hello")] * count)
    head = wire.ControlLine(b"a.b", reply, len(given_headers) or -1, len(given_headers) + 5, b"7")
    assert flat(wire.ServerReader().feed(passed)) == [(head, given_headers + b"hello")] * count


def test_commands_read_back() -> None:
    options = b"".join(
        (
            wire.connect({"name": "n"}),
            wire.subscribe(b"a", b"1"),
            wire.subscribe(b"a", b"2", b"g"),
            wire.unsubscribe(b"1"),
            wire.unsubscribe(b"2", 5),
        )
    )
    assert read(options) == [
        wire.Connect(msgspec.json.encode({"name": "n"})),
        wire.Subscribe(b"a", b"", b"1"),
        wire.Subscribe(b"a", b"g", b"2"),
        wire.Unsubscribe(b"1", 0),
        wire.Unsubscribe(b"2", 5),
    ]


def test_errors_are_in_single_quotes() -> None:
    assert wire.error("it's wrong") == b"-ERR 'its wrong'\r\n"
    assert (
        wire.permissions_violation("Subscription", b"a.>")
        == b"-ERR 'Permissions Violation for Subscription to \"a.>\"'\r\n"
    )


def test_either_all_messages_of_a_batch_have_headers_or_none() -> None:
    headers = b"NATS/1.0\r\nA: b\r\n\r\n"
    found = wire.messages(b"a", b"7", b"", [(b"", b"one"), (headers, b"two"), (b"", b"six"), (headers, b"")])
    sizes = len(headers), len(headers) + 3
    assert found == (
        b"MSG a 7 3\r\none\r\n"
        b"HMSG a 7 %d %d\r\n%btwo\r\n"
        b"MSG a 7 3\r\nsix\r\n"
        b"HMSG a 7 %d %d\r\n%b\r\n" % (*sizes, headers, sizes[0], sizes[0], headers)
    )
