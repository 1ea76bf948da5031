"""vLLM's speculative configurations that name a folder and no method: what it holds decides."""

from dataclasses import replace

import pytest
from published_heads import publish

from outrider.core.errors import ConfigError
from outrider.drafters.block import BlockConfig
from outrider.drafters.draft_model import DraftModelConfig
from outrider.drafters.eagle import EagleConfig
from outrider.drafters.medusa import MedusaConfig
from outrider.drafters.mtp import MtpConfig
from outrider.drafters.speculative_config import from_vllm


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("eagle1", EagleConfig(model="x", k=4, kind="eagle")),
        ("speculators", EagleConfig(model="x", k=4, kind="eagle3")),
        ("dspark", BlockConfig(model="x", k=4)),
        ("medusa", MedusaConfig(model="x", k=4, tree=0)),
        ("mtp-mimo", MtpConfig(model="x", k=4)),
    ],
)
def test_a_folder_without_a_method_is_known_by_its_files(layout, expected, tmp_path):
    publish(tmp_path, layout)
    config = {"model": str(tmp_path), "num_speculative_tokens": 4}
    assert from_vllm(config) == replace(expected, model=str(tmp_path))
    if layout == "mtp-mimo":  # a whole model, which may draft as such
        assert from_vllm(config | {"method": "draft_model"}) == DraftModelConfig(model=str(tmp_path), k=4)
    else:
        with pytest.raises(ConfigError, match="is a drafting head; its method is"):
            from_vllm(config | {"method": "draft_model"})
