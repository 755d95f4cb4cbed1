"""A plain Megatron-core training script into which mppo's hook is put, and nothing else of mppo.

torchrun --nproc-per-node 2 plain_megatron.py RESULTS TP PP
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from mppo.algorithm.actor_loss import ActorTerms
from mppo.algorithm.aggregation import BatchCounts, token_weights
from mppo.algorithm.policy_losses import policy_loss
from mppo.batch.packed import pack
from mppo.batch.trajectory import Trajectory, TrajectoryId
from mppo.megatron.head import PolicyHead
from mppo.megatron.layers import decoder_spec
from mppo.megatron.objectives import LogProbPass, PolicyObjective
from mppo.megatron.output_layer import install_head
from mppo.megatron.schedule import ForwardStep

# isort: split
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

VOCABULARY, STEPS = 64, 10
results, tp, pp = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group()
parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
tensor_parallel.model_parallel_cuda_manual_seed(1)
first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()

parallel = dict(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, pipeline_dtype=torch.float32)
sizes = dict(num_layers=2, hidden_size=32, num_attention_heads=4, attention_dropout=0.0, hidden_dropout=0.0)
packed = dict(variable_seq_lengths=True, moe_token_dispatcher_type="alltoall", calculate_per_token_loss=True)
plain = dict(add_bias_linear=False, gradient_accumulation_fusion=False, use_cpu_initialization=True)
config = TransformerConfig(**sizes, **parallel, **packed, **plain, normalization="RMSNorm")
config.finalize_model_grads_func = finalize_model_grads
stages = dict(pre_process=first, post_process=last, position_embedding_type="rope")
model = GPTModel(config, decoder_spec(config, vp_stage=None), VOCABULARY, 128, **stages).cuda()
install_head(model)
model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=3e-3), [model])

answer = torch.arange(8) >= 3
texts = torch.randint(VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(0))
batch = pack([Trajectory(TrajectoryId(i, 0), token_ids, answer, torch.zeros(8)) for i, token_ids in enumerate(texts)])
counts = BatchCounts(loss_tokens=int(batch.mask.sum()), trajectories=4)
weights = token_weights("token-mean", batch.mask, batch.segments, counts, norm=1.0)
rewarded = torch.tensor([1.0, -1.0, 1.0, -1.0])[batch.segments.ids]
batch = batch.with_fields(advantages=rewarded, token_weights=weights)
head = PolicyHead(VOCABULARY, 1.0, parallel_state.get_tensor_model_parallel_group())
objective = PolicyObjective(head, ActorTerms(policy_loss("vanilla")), batch.real_tokens)


def schedule(closure, **options):
    options |= dict(forward_step_func=ForwardStep(closure), model=model, micro_batch_size=1, seq_length=16)
    pieces = [batch.select([0, 1]), batch.select([2, 3])]
    return get_forward_backward_func()(data_iterator=iter(pieces), num_microbatches=len(pieces), **options)


history = []
for _ in range(STEPS + 1):
    with torch.no_grad():
        before = schedule(LogProbPass(head), forward_only=True, collect_non_loss_data=True)
    if last:
        old = batch.gather_back([o["origin"] for o in before], [o["log_probs"] for o in before])
        batch = batch.with_fields(old_log_probs=old)
        history.append([old[batch.mask & (rewarded == sign)].mean().item() for sign in (1, -1)])
    model.zero_grad_buffer()
    schedule(objective, forward_only=False)
    optimizer.step()
if dist.get_rank() == dist.get_world_size() - 1:
    results.write_text(json.dumps(history))
dist.destroy_process_group()
