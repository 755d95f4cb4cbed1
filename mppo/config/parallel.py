"""The model, and how it is cut."""

from dataclasses import dataclass, field
from typing import Any

from mppo.config.checks import not_negative, one_of, positive
from mppo.errors import ConfigError

PIPELINE_FIELDS = (
    "virtual_pipeline_model_parallel_size",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
)
"""How the stages of a pipeline are made up; without a pipeline they have no effect."""


@dataclass
class ParallelConfig:
    """How the model is cut. What is left of the world is data parallel."""

    tensor_model_parallel_size: int = 1
    """Ranks over which each matrix is cut."""
    pipeline_model_parallel_size: int = 1
    """Stages of the pipeline, each with some of the layers."""
    virtual_pipeline_model_parallel_size: int | None = None
    """Model chunks of each pipeline stage, for the interleaved schedule; null: one."""
    num_layers_in_first_pipeline_stage: int | None = None
    """Layers of the stage that holds the embedding too. null: layers are spread evenly over the stages that are not
    told otherwise; what does not divide goes to late ones, to the last one last."""
    num_layers_in_last_pipeline_stage: int | None = None
    """The same of the stage that holds the output layer and the loss too."""
    context_parallel_size: int = 1
    """Ranks over which each sequence is cut."""
    expert_model_parallel_size: int = 1
    """Ranks that the experts of a layer are dealt out to; it divides TP x CP x DP."""
    sequence_parallel: bool = False
    """Cut activations between tensor-parallel regions along the sequence."""
    timeout_minutes: int = 30
    """How long a collective may wait for a rank."""

    @property
    def model_parallel_size(self) -> int:
        """Ranks of one replica of the model: TP x PP x CP."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def expert_tensor_parallel_size(self) -> int:
        """Ranks over which one expert is cut: those of tensor parallelism, or with expert parallelism none.

        Expert parallelism deals whole experts out to tensor-, context- and data-parallel ranks alike.
        """
        return 1 if self.expert_model_parallel_size > 1 else self.tensor_model_parallel_size

    def __post_init__(self):
        positive(
            "parallel",
            tensor_model_parallel_size=self.tensor_model_parallel_size,
            pipeline_model_parallel_size=self.pipeline_model_parallel_size,
            **{name: getattr(self, name) for name in PIPELINE_FIELDS},
            context_parallel_size=self.context_parallel_size,
            expert_model_parallel_size=self.expert_model_parallel_size,
            timeout_minutes=self.timeout_minutes,
        )
        if self.virtual_pipeline_model_parallel_size == 1:
            self.virtual_pipeline_model_parallel_size = None
        for name in PIPELINE_FIELDS:
            if getattr(self, name) and self.pipeline_model_parallel_size == 1:
                raise ConfigError(f"parallel.{name} needs pipeline_model_parallel_size of at least 2")
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ConfigError("parallel.sequence_parallel has no effect at tensor_model_parallel_size=1; unset it")


@dataclass
class RecomputeConfig:
    """Activations that are computed again in the backward pass instead of kept; Megatron-core's fields."""

    granularity: str | None = None
    """`full`: whole layers; `selective`: the modules named; null: keep all."""
    method: str = "uniform"
    """Of `full`: `uniform`, the input of every num_layers layers is kept, or `block`, the first num_layers of a stage.
    """
    num_layers: int = 1
    """Of `full`: how many, by the method."""
    modules: list[str] = field(default_factory=lambda: ["core_attn"])
    """Of `selective`: `core_attn`, `mlp`, for mixtures of experts `moe`, and with Transformer Engine's layers
    `layernorm` and `moe_act`."""

    def __post_init__(self):
        for module in self.modules:
            one_of("recompute.modules", module, ("core_attn", "mlp", "layernorm", "moe", "moe_act"))
        if self.granularity is not None:
            one_of("recompute.granularity", self.granularity, ("full", "selective"))
        one_of("recompute.method", self.method, ("uniform", "block"))
        positive("recompute", num_layers=self.num_layers)
        without = "has no effect without recompute.granularity="
        if self.granularity != "full" and (self.method, self.num_layers) != ("uniform", 1):
            raise ConfigError(f"recompute.method and num_layers: {without}full")
        if self.granularity != "selective" and self.modules != ["core_attn"]:
            raise ConfigError(f"recompute.modules {without}selective")
        if self.granularity == "selective" and not self.modules:
            raise ConfigError("recompute.modules is empty; name what is recomputed, or unset recompute.granularity")


@dataclass
class ModelSource:
    """Which model is trained, in which dtype, and what of it is computed twice to save memory."""

    path: str | None = None
    """A Hugging Face model folder: config.json, safetensors, tokenizer."""
    preset: str | None = None
    """Instead of a folder: a small model from random initialisation."""
    preset_options: dict[str, Any] = field(default_factory=dict)
    """Fields of the preset's Hugging Face configuration to change."""
    dtype: str = "bfloat16"
    """`bfloat16` (with fp32 master weights and gradients) or `float32`."""
    make_vocab_size_divisible_by: int = 128
    """The embedding is padded to a multiple of this times the tensor-parallel size."""
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    fp32_logits: bool = False
    """With dtype bfloat16: make the logits as float32, instead of rounding them to bfloat16 first. Costs time in the
    output projection, and no memory beside a tile of it."""
    megatron: dict[str, Any] = field(default_factory=dict)
    """Further fields of Megatron-core's TransformerConfig, for actor, critic and reference: kernels and schedules that
    mppo does not set itself, such as {bias_activation_fusion: false}."""
    moe_aux_loss_coeff: float = 0.0
    """Coefficient of the load-balancing loss of a mixture of experts, in the training of the actor."""

    def __post_init__(self):
        if self.path is not None and self.preset is not None:
            raise ConfigError("model.path and model.preset exclude each other; unset one (model.preset=null)")
        if self.preset_options and self.preset is None:
            raise ConfigError("model.preset_options has no effect without model.preset")
        one_of("model.dtype", self.dtype, ("bfloat16", "float32"))
        if self.fp32_logits and self.dtype == "float32":
            raise ConfigError("model.fp32_logits has no effect with model.dtype=float32, whose logits are; unset it")
        positive("model", make_vocab_size_divisible_by=self.make_vocab_size_divisible_by)
        not_negative("model", moe_aux_loss_coeff=self.moe_aux_loss_coeff)
