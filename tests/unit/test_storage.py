"""Places of tables and streams: an address that nothing can open is one sentence."""

import pytest

from postroom.errors import Unavailable
from postroom.pipeline.delta.storage import Storage


def test_an_unknown_kind_of_address_is_one_sentence() -> None:
    with pytest.raises(Unavailable, match=r"^nonsense://x cannot be opened: Unknown scheme: nonsense"):
        Storage("nonsense://x").files()
