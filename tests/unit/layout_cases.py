"""Hypothesis strategies for models, layouts of trainers and layouts of whole tensors and SGLang workers."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from mppo.megatron.model_config import ModelConfig
from mppo.megatron.topology import Sizes
from mppo.weights.architectures import ARCHITECTURES, Architecture
from mppo.weights.megatron_layout import Stages, megatron_layout
from mppo.weights.sglang_layout import sglang_layout
from mppo.weights.transfer_plan import Layout, whole_tensors

MOST_RANKS = 12


@dataclass(frozen=True)
class Job:
    """A trainer's side of a plan."""

    architecture: Architecture
    model: ModelConfig
    sizes: Sizes
    stages: Stages
    value_head: bool
    layout: Layout

    @property
    def ranks(self) -> range:
        return range(len(self.layout.holdings))

    def __repr__(self) -> str:
        return f"Job({self.architecture.hf_name}, {self.model}, {self.sizes}, {self.stages}, {self.value_head})"


@st.composite
def jobs(draw: DrawFn, value_heads: bool = True) -> Job:
    """Of every architecture; layers are dealt out to stages and chunks unevenly, some get none."""
    architecture = draw(st.sampled_from(ARCHITECTURES))
    tp, cp, dp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2])), draw(st.integers(1, 3))
    within = tp * cp * dp
    pp = draw(st.integers(1, max(1, MOST_RANKS // within)))
    ep = draw(st.sampled_from([n for n in (1, 2, 4) if within % n == 0])) if architecture.experts else 1
    vpp = draw(st.sampled_from([None, 2])) if pp > 1 else None
    model = ModelConfig(
        num_layers=draw(st.integers(1, 3)),
        hidden_size=6,
        num_attention_heads=4,
        num_query_groups=draw(st.sampled_from([n for n in (1, 2, 4) if n % tp == 0])),
        head_dim=2,
        ffn_hidden_size=8,
        vocab_size=draw(st.integers(3, 90)),
        max_position_embeddings=8,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        tie_word_embeddings=draw(st.booleans()),
        qkv_bias=architecture.qkv_bias,
        qk_norm=architecture.qk_norm,
        make_vocab_size_divisible_by=draw(st.sampled_from([1, 8])),
        num_experts=4 if architecture.experts else None,
        moe_ffn_hidden_size=4 if architecture.experts else None,
    )
    cuts = sorted(
        draw(st.lists(st.integers(0, model.num_layers), min_size=pp * (vpp or 1) - 1, max_size=pp * (vpp or 1) - 1))
    )
    bounds = [0, *cuts, model.num_layers]
    of_chunks = [tuple(range(a, b)) for a, b in zip(bounds, bounds[1:], strict=False)]
    stages = tuple(tuple(of_chunks[stage::pp]) for stage in range(pp))
    value_head = value_heads and draw(st.booleans())
    sizes = Sizes(tp, pp, vpp, cp, dp, ep, etp=1 if ep > 1 else tp, sequence_parallel=tp > 1)
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    layout = megatron_layout(architecture.rows(model, value_head), model, sizes, stages, dtype)
    return Job(architecture, model, sizes, stages, value_head, layout)


@st.composite
def whole_targets(draw: DrawFn, job: Job) -> Layout:
    """On every rank, or dealt out to some of them, or on a process that is no rank of the job."""
    tensors = job.layout.tensors
    kind = draw(st.sampled_from(["everywhere", "dealt out", "elsewhere"]))
    if kind == "everywhere":
        names = {rank: list(tensors) for rank in job.ranks}
    elif kind == "elsewhere":
        names = {"elsewhere": list(tensors)}
    else:
        owners = {name: draw(st.sampled_from(list(job.ranks))) for name in tensors}
        names = {rank: [name for name in tensors if owners[name] == rank] for rank in job.ranks}
    return whole_tensors(tensors, names, draw(st.sampled_from([None, torch.bfloat16])))


@st.composite
def sglang_targets(draw: DrawFn, job: Job) -> Layout:
    """One or two servers of any number of workers."""
    tp = draw(st.sampled_from([1, 2, 4]))
    ep = draw(st.sampled_from([n for n in (1, 2, 4) if n <= tp])) if job.architecture.experts else 1
    servers = range(draw(st.integers(1, 2)))
    return sglang_layout(job.architecture, job.model, tp, torch.bfloat16, ep=ep, servers=servers)
