"""Places of tables and streams: an address that nothing can open is one sentence."""

import pytest

from postroom.errors import Unavailable
from postroom.pipeline.delta.storage import Storage


def test_an_unknown_kind_of_address_gives_a_one_line_error() -> None:
    with pytest.raises(Unavailable, match=r"^nonsense://x cannot be opened: Unknown scheme: nonsense"):
        Storage("nonsense://x").files()
