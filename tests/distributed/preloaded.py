"""What the fork server of ranks.py imports once, so that no rank has to: about eight seconds."""

import gc
import importlib
import os

os.environ.update(
    OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1"
)

MODULES = (
    "mppo.cli.main",
    "mppo.cli.plan",
    "mppo.trainer.trainer",
    "mppo.planning.run_plan",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "megatron.core.dist_checkpointing",
)

for module in MODULES:
    importlib.import_module(module)
gc.freeze()  # or the collector would write to, and so copy, all that was imported in every rank
