"""Which layers, kernels and libraries a model of some dtype gets on this machine, and what stands in for what is not
there."""

from dataclasses import dataclass, fields
from importlib.util import find_spec

import megatron.core
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from mppo.megatron import platform


def uses_transformer_engine(dtype: torch.dtype) -> bool:
    """Its attention takes packed sequences in half precision only; float32 goes through the local layers."""
    return platform.has_transformer_engine() and dtype != torch.float32


def groups_experts(dtype: torch.dtype) -> bool:
    """Whether the local experts run as Transformer Engine's grouped products (never tried yet), or one by one."""
    return uses_transformer_engine(dtype) and _serves("TEColumnParallelGroupedLinear")


def _serves(name: str) -> bool:
    """Whether the installed Transformer Engine, as Megatron-core sees it, has it."""
    from megatron.core.extensions import transformer_engine

    return getattr(transformer_engine, name, None) is not None


def _is_installed(extension: str) -> bool:
    """Of apex, which builds each as a module of its own."""
    return find_spec(extension) is not None


@dataclass(frozen=True)
class Fusions:
    """Fields of Megatron's configuration that are on where Transformer Engine or apex serve them (unproven: no GPU has
    run them)."""

    bias_activation_fusion: bool
    """A feed-forward layer's gate and activation in one kernel."""
    apply_rope_fusion: bool
    """The rotary embedding in one kernel."""
    gradient_accumulation_fusion: bool
    """Products of the backward pass that add to the gradient buffer themselves: apex's, which Megatron's own layers
    want even beside Transformer Engine's."""
    moe_permute_fusion: bool
    """The rows of a mixture of experts sorted without the host waiting for their number."""

    @classmethod
    def of(cls, dtype: torch.dtype) -> "Fusions":
        fused = uses_transformer_engine(dtype)
        return cls(
            bias_activation_fusion=fused,
            apply_rope_fusion=fused,
            gradient_accumulation_fusion=platform.has_cuda() and _is_installed("fused_weight_gradient_mlp_cuda"),
            moe_permute_fusion=fused and _serves("fused_permute_with_probs"),
        )


def adam() -> str:
    """Of Megatron-core's choice, in its order."""
    if platform.has_transformer_engine():
        return "Transformer Engine's fused Adam"
    if platform.has_cuda() and _is_installed("amp_C"):
        return "apex's fused Adam"
    return "torch's Adam"


def in_use(config: TransformerConfig) -> list[tuple[str, str, str]]:
    """What, which, and what it stands in for ("" where it is the first choice), for a model with this configuration of
    Megatron's."""
    dtype = config.params_dtype
    fused, missing = uses_transformer_engine(dtype), _missing(dtype)
    named = {field.name: field.name.removesuffix("_fusion") for field in fields(Fusions)}
    on, off = ([short for name, short in named.items() if getattr(config, name) == wanted] for wanted in (True, False))
    precision = "bfloat16, fp32 master weights" if dtype == torch.bfloat16 else "float32"
    backends = "NCCL on the device, gloo on the host" if platform.has_cuda() else "gloo"
    return [
        ("device", torch.cuda.get_device_name() if platform.has_cuda() else "CPU", ""),
        ("libraries", f"torch {torch.__version__}, megatron-core {megatron.core.__version__}", ""),
        ("precision", precision, ""),
        ("layers", "Transformer Engine's" if fused else "Megatron's local ones", missing),
        ("attention", "Transformer Engine's, packed" if fused else "torch's, run by run of equal length", missing),
        ("optimizer", adam(), "a fused one" if adam().startswith("torch") else ""),
        ("fusions", ", ".join(on) or "none", ", ".join(off)),
        ("process groups", backends, "" if platform.has_cuda() else "NCCL"),
    ]


def _missing(dtype: torch.dtype) -> str:
    if uses_transformer_engine(dtype):
        return ""
    if not platform.has_cuda():
        return "Transformer Engine's: there is no GPU"
    if not platform.has_transformer_engine():
        return "Transformer Engine's: it is not installed"
    return "Transformer Engine's: it has no packed attention in float32"
