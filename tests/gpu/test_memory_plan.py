"""Memory on CUDA is shared out from what was measured; too little is an error at start, with the numbers."""

from __future__ import annotations

import pytest
import torch

from outrider.errors import ConfigError
from outrider.synthetic import synthetic_pair
from outrider.target.memory import Beside, measure_workspace, plan_memory

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def decoder():
    return synthetic_pair("tiny", device=torch.device("cuda"), dtype=torch.bfloat16).target


def test_what_is_wanted_is_planned_where_it_fits(decoder):
    plan = plan_memory(decoder, 512, round_tokens=256, wanted=4096, asked=None, beside=Beside())
    assert plan.tokens == 4096
    assert plan.workspace >= measure_workspace(decoder, 512, 64) // 2
    assert str(plan.tokens) in str(plan)


def test_a_draft_model_beside_takes_its_share(decoder):
    free = torch.cuda.mem_get_info()[0]
    alone, shared = (
        plan_memory(decoder, 512, round_tokens=256, wanted=1 << 40, asked=None, beside=beside)
        for beside in (Beside(), Beside(weights=free // 4, a_token=0))
    )
    assert shared.tokens < 0.8 * alone.tokens


def test_more_than_there_is_room_for_is_refused_with_the_numbers(decoder):
    with pytest.raises(ConfigError, match=r"no room for a cache of \d+ tokens, but for \d+\. Of .* GiB"):
        plan_memory(decoder, 512, round_tokens=256, wanted=64, asked=1 << 40, beside=Beside())
    free = torch.cuda.mem_get_info()[0]
    with pytest.raises(ConfigError, match="no room"):
        plan_memory(decoder, 512, round_tokens=256, wanted=4096, asked=None, beside=Beside(weights=free))
