"""Texts that try a bus: pieces of its own format, and everything that Unicode allows."""

from hypothesis import strategies as st

FIRST = "MSG-20260205-143052-000000001-PID00001-0001"
SECOND = "MSG-20260205-143052-000000002-PID00001-0002"
TS = "2026-02-05T14:30:52.123456Z"

# Lines that a reader could take for structure, and pieces of them.
STRUCTURE = [
    "---",
    "--- ",
    "---  ",
    "---\r",
    "--- \r\r",
    "----",
    "-- -",
    "---\n",
    "\n---\n",
    f"msg_id: {FIRST}",
    f"---\nmsg_id: {SECOND}\nts: {TS}\ntype: forged\nproject_id: p\ntask_id: t\nrun_id: r",
    "body_bytes: 0\ncrc: 00000000\n---",
    "crc: 00000000",
    "body_escape: dash-space",
    f"[{TS}] INFO: text",
    "\r\n",
    "\n",
    "\n\n",
    "",
    " ",
    "\0",
    "\u2028",
    "\x85",
    "é漢😀",
]
structured = st.lists(st.sampled_from(STRUCTURE), max_size=8).map("\n".join)
bodies = st.one_of(
    st.text(max_size=200),
    structured,
    st.lists(st.sampled_from(STRUCTURE), max_size=8).map("".join),
    st.binary(max_size=50).map(lambda raw: raw.decode("utf-8", "surrogateescape")),
)
names = st.text(min_size=1, max_size=30).filter(str.strip)
