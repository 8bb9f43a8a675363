"""Flame graphs from folded stacks, as SVG and as speedscope JSON.

A folded stack is a path of frames with the time spent in the last one. Equal paths share a frame.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from postroom.core.history.tracing import OPEN, Span
from postroom.pipeline.report.plots import CALM, WIDTH, Drawing, hint, svg
from postroom.pipeline.report.words import duration, esc, share

ROW: Final = 21
NARROWEST: Final = 0.4  # pixels; thinner nodees are not drawn
CHARACTER: Final = 6.3  # pixels of a character, on average
STACK_OF_WAITING: Final = "waiting"
UNNAMED_TYPE: Final = "?"  # as in `silver_spans`
SPEEDSCOPE: Final = "https://www.speedscope.app/file-format-schema.json"

Stack = tuple[tuple[str, ...], int]
"""A path of frames, and the microseconds of its last frame."""


class Profile(NamedTuple):
    """The stacks of a goal."""

    name: str
    stacks: Sequence[Stack]

    @property
    def total_us(self) -> int:
        return sum(us for _, us in self.stacks)


class FlameNode:
    """A node of the tree: a frame and its children."""

    __slots__ = ("below", "name", "own_us", "total_us")

    def __init__(self, name: str) -> None:
        self.name = name
        self.own_us = 0
        self.total_us = 0
        self.below: dict[str, FlameNode] = {}


def tree(profile: Profile) -> FlameNode:
    """The stacks as a tree. The root is the whole profile."""
    root = FlameNode(profile.name)
    for path, us in profile.stacks:
        node = root
        node.total_us += us
        for name in path:
            node = node.below.setdefault(name, FlameNode(name))
            node.total_us += us
        node.own_us += us
    return root


def profile_of(name: str, spans: Iterable[Span]) -> Profile:
    """The profile of the messages of a request or a goal, each after its parent.

    A stack has the types from the root downwards. The wait until the first delivery is a frame of its own, as
    in the profiles of `gold_flames`. A message that has not ended has no time yet.
    """
    path: list[str] = []
    sums: dict[tuple[str, ...], int] = {}
    for span in spans:
        path[span.depth :] = [span.type or UNNAMED_TYPE]
        if span.outcome == OPEN:
            continue
        waited_us = max(0, span.wait_us or 0)
        for stack, us in (((*path,), span.total_us - waited_us), ((*path, STACK_OF_WAITING), waited_us)):
            if us > 0:
                sums[stack] = sums.get(stack, 0) + us
    return Profile(name, sorted(sums.items()))


def colours_of(profiles: Iterable[Profile]) -> dict[str, int]:
    """A colour for each kind of frame, the most frequent first."""
    frames = Counter(name.split(" ", 1)[0] for one in profiles for path, _ in one.stacks for name in path)
    del frames[STACK_OF_WAITING]
    kinds = sorted(frames, key=lambda kind: (-frames[kind], kind))
    return {kind: CALM[n % len(CALM)] for n, kind in enumerate(kinds)}


def svg_file(profile: Profile) -> str:
    """A flame graph as a file of its own, with the style of the report."""
    drawn = flame_graph(profile, duration(profile.total_us), colours_of([profile]))
    style = (Path(__file__).parent / "style.css").read_text("utf-8")
    head, body = drawn.split(">", 1)
    return f'{head} xmlns="http://www.w3.org/2000/svg"><style><![CDATA[{style}]]></style>{body}\n'


def flame_graph(profile: Profile, said: str, colours: dict[str, int]) -> Drawing:
    """Draw the root on top and the children below it. Width is time."""
    root = tree(profile)
    placed = list(_place(root, 0.0, 0, WIDTH / max(1, root.total_us))) or [(root, 0.0, 0, float(WIDTH))]
    height = ROW * (1 + max(depth for _, _, depth, _ in placed)) + 2
    body = "".join(_drawn(node, x, depth, wide, root.total_us, colours) for node, x, depth, wide in placed)
    return svg(WIDTH, height, f"Flame graph of {profile.name}", said, body, "plot flame")


def _place(
    node: FlameNode, x: float, depth: int, scale: float
) -> Iterator[tuple[FlameNode, float, int, float]]:
    wide = node.total_us * scale
    if wide < NARROWEST:
        return
    yield node, x, depth, wide
    for child in sorted(node.below.values(), key=lambda one: (-one.total_us, one.name)):
        yield from _place(child, x, depth + 1, scale)
        x += child.total_us * scale


def _drawn(node: FlameNode, x: float, depth: int, wide: float, whole_us: int, colours: dict[str, int]) -> str:
    hint_text = (
        f"{node.name}\n{duration(node.total_us)}, {share(node.total_us / max(1, whole_us))} of the goal"
    )
    if node.below and node.own_us:
        hint_text += f"\nof it {duration(node.own_us)} itself"
    kind = node.name.split(" ", 1)[0]
    style = "root" if depth == 0 else "waiting" if kind == "waiting" else f"c{colours.get(kind, 0)}"
    fits = int((wide - 8) / CHARACTER)
    text = ""
    if fits >= 4:  # noqa: PLR2004 - fewer characters say nothing
        shown = node.name if len(node.name) <= fits else f"{node.name[: fits - 1]}…"
        text = f'<text x="{x + 5:.1f}" y="{depth * ROW + 14.5}">{esc(shown)}</text>'
    return (
        f'<g class="box"><rect class="fill {style}" x="{x:.2f}" y="{depth * ROW}" '
        f'width="{max(0.3, wide - 0.6):.2f}" height="{ROW - 1.4}" rx="2"/>{text}{hint(hint_text)}</g>'
    )


def speedscope(profiles: Iterable[Profile], name: str) -> dict[str, Any]:
    """The content of a speedscope file: one sampled profile for each goal, in microseconds."""
    frames: dict[str, int] = {}
    made = []
    for profile in profiles:
        ordered = sorted(profile.stacks)
        samples = [[frames.setdefault(frame, len(frames)) for frame in path] for path, _ in ordered]
        weights = [us for _, us in ordered]
        made.append(
            {
                "type": "sampled",
                "name": profile.name,
                "unit": "microseconds",
                "startValue": 0,
                "endValue": sum(weights),
                "samples": samples,
                "weights": weights,
            }
        )
    return {
        "$schema": SPEEDSCOPE,
        "exporter": "postroom",
        "name": name,
        "activeProfileIndex": 0,
        "shared": {"frames": [{"name": frame} for frame in frames]},
        "profiles": made,
    }
