"""Let assertions in the shared helpers say what differed."""

import pytest

pytest.register_assert_rewrite("plain_decoding", "testbed")
