"""Transformers' own server, for machines without `accelerate`.

    python benchmarks/transformers_server.py FOLDER --port PORT [options of `transformers serve`]

`transformers serve` loads its model with a device map, which needs `accelerate` even on a CPU.
Here the model is loaded without one; all the rest is Transformers' own.
"""

from __future__ import annotations

import sys
from typing import Any

from transformers import AutoModelForCausalLM
from transformers.cli import transformers as command
from transformers.cli.serving import model_manager


class CpuModelManager(model_manager.ModelManager):
    """Loads a model to the CPU without a device map."""

    def _load_model(self, model_id_and_revision: str, *args: Any, **options: Any) -> Any:
        folder = model_id_and_revision.partition("@")[0]
        return AutoModelForCausalLM.from_pretrained(folder, dtype=self.dtype).eval()


if __name__ == "__main__":
    model_manager.ModelManager = CpuModelManager
    sys.argv[1:1] = ["serve"]
    command.main()
