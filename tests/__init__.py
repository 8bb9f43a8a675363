"""The tests. What they share with users of `postroom.testing` shows its asserts as theirs do."""

import pytest

pytest.register_assert_rewrite("postroom.testing")
