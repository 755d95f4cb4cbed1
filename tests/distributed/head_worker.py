"""The chunked output head, and sums over slices of trajectories, against dense maths; runs on every rank."""

from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mppo.algorithm.kl import full
from mppo.algorithm.policy_losses import policy_loss
from mppo.algorithm.segments import Segments
from mppo.check_loss.examination import draw_sample, loss_and_gradient, token_losses
from mppo.megatron.collectives import sum_with_gradient
from mppo.megatron.head import TERMS, LastHidden, PolicyHead

HIDDEN = 12
DIFFERENTIABLE = ("log_probs", "entropy", "full_kl")


@dataclass(frozen=True)
class HeadCase:
    tokens: int = 23
    vocabulary: int = 37
    multiple: int = 8
    """The vocabulary is padded to a multiple of this times the number of ranks."""
    temperature: float = 1.0
    chunk: int = 5
    dtype: str = "float64"
    nearness: float = 1.0
    """How far the reference is from the policy."""
    block: int | None = 5
    terms: tuple[str, ...] = TERMS
    """What is asked for, and if it has a gradient, brings one."""
    idle: float = 0.0
    """Share of the tokens that bring none."""
    fp32_logits: bool = False

    @property
    def name(self) -> str:
        return "-".join(f"{key}={value}" for key, value in asdict(self).items())


HEAD_CASES = [
    HeadCase(),
    HeadCase(temperature=0.7),
    HeadCase(chunk=1000),
    HeadCase(chunk=1),
    HeadCase(block=None),
    HeadCase(chunk=1000, block=1),
    HeadCase(temperature=0.7, terms=("log_probs",)),
    HeadCase(temperature=0.7, terms=("log_probs", "entropy")),
    HeadCase(terms=("full_kl",)),
    HeadCase(terms=("entropy", "sum_pi_squared")),
    HeadCase(tokens=0),
    HeadCase(vocabulary=40, multiple=1),
    HeadCase(vocabulary=5, multiple=64),
    HeadCase(nearness=1e-2),
    HeadCase(idle=0.5),
    HeadCase(idle=0.5, terms=("log_probs",)),
    HeadCase(idle=0.9, terms=("log_probs", "entropy"), temperature=0.7),
    HeadCase(idle=1.0),
    HeadCase(dtype="float32"),
    HeadCase(dtype="float32", nearness=1e-3),
    HeadCase(dtype="bfloat16"),
    HeadCase(dtype="bfloat16", fp32_logits=True),
]
SLICED_LOSSES = ("gspo", "geo_mean", "vanilla")


def relative(found: Tensor, expected: Tensor) -> float:
    if not expected.numel():
        return float(found.numel())
    scale = expected.abs().max()
    return ((found.double() - expected).abs().max() / (scale if scale > 0 else 1.0)).item()


def head_errors(case: HeadCase) -> dict[str, float]:
    """Every output and gradient of the head with this rank's rows, against the dense ones in float64."""
    generator = torch.Generator().manual_seed(7)
    ranks, rank, dtype = dist.get_world_size(), dist.get_rank(), getattr(torch, case.dtype)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.double)

    def rounded(x: Tensor) -> Tensor:
        """The inputs are exact in the dtype of the case."""
        return x.to(dtype).double()

    hidden, weight = rounded(draw(case.tokens, HIDDEN)), rounded(draw(case.vocabulary, HIDDEN))
    ref_hidden = rounded(hidden + case.nearness * draw(case.tokens, HIDDEN))
    ref_weight = rounded(weight + case.nearness * draw(case.vocabulary, HIDDEN))
    labels = torch.randint(case.vocabulary, (case.tokens,), generator=generator)
    slopes = draw(3, case.tokens) * torch.tensor([[name in case.terms] for name in DIFFERENTIABLE])

    slopes[:, torch.randperm(case.tokens, generator=generator)[: round(case.idle * case.tokens)]] = 0.0

    columns = -(-case.vocabulary // (case.multiple * ranks)) * case.multiple
    padding = torch.full((columns * ranks - case.vocabulary, HIDDEN), 1e3, dtype=torch.double)

    def mine(rows: Tensor) -> Tensor:
        return torch.cat([rows, padding])[rank * columns : (rank + 1) * columns].to(dtype)

    expected = dense_head(hidden, weight, ref_hidden, ref_weight, labels, case.temperature, slopes)
    own_hidden, own_weight = hidden.to(dtype).requires_grad_(), mine(weight).requires_grad_()
    head = PolicyHead(case.vocabulary, case.temperature, dist.group.WORLD, case.chunk, case.block, case.fp32_logits)
    reference = LastHidden(ref_hidden.to(dtype), mine(ref_weight))
    output = vars(head(LastHidden(own_hidden, own_weight), labels, reference, case.terms))
    assert {name for name, x in output.items() if x is not None} == {"log_probs", *case.terms}
    sum((output[n] * s).sum() for n, s in zip(DIFFERENTIABLE, slopes, strict=True) if n in case.terms).backward()
    hidden_grad = own_hidden.grad.float() if dtype == torch.bfloat16 else own_hidden.grad
    dist.all_reduce(hidden_grad)
    found = {**output, "hidden_grad": hidden_grad, "weight_grad": own_weight.grad}
    expected["weight_grad"] = torch.cat([expected["weight_grad"], 0 * padding])[rank * columns : (rank + 1) * columns]
    return {name: relative(x.detach(), expected[name]) for name, x in found.items() if x is not None}


def dense_head(
    hidden: Tensor, weight: Tensor, ref_hidden: Tensor, ref_weight: Tensor, labels: Tensor, temperature: float, slopes
) -> dict[str, Tensor]:
    """log_softmax over the whole vocabulary, and plain autograd."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    log_p = torch.log_softmax(hidden @ weight.t() / temperature, -1)
    log_q = torch.log_softmax(ref_hidden @ ref_weight.t() / temperature, -1)
    outputs = {
        "log_probs": log_p.gather(1, labels[:, None]).squeeze(1),
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "full_kl": full(log_p, log_q),
    }
    (torch.stack(list(outputs.values())) * slopes).sum().backward()
    outputs["sum_pi_squared"] = (2 * log_p).exp().sum(-1)
    return {name: x.detach() for name, x in outputs.items()} | {
        "hidden_grad": hidden.grad,
        "weight_grad": weight.grad,
    }


def products_backward(idle: int) -> int:
    """Floating-point operations of a backward pass over 12 tokens, `idle` of which bring no gradient."""
    generator = torch.Generator().manual_seed(3)
    drawn = (torch.randn(n, HIDDEN, generator=generator).bfloat16() for n in (12, 16))
    hidden, weight = (x.requires_grad_() for x in drawn)  # in bfloat16 no product is made in place, and all are counted
    head = PolicyHead(16 * dist.get_world_size(), 1.0, dist.group.WORLD)
    log_probs = head(LastHidden(hidden, weight), torch.arange(12), names=("log_probs",)).log_probs
    slopes = torch.ones(12)
    slopes[:idle] = 0.0
    with FlopCounterMode(display=False) as counter:
        log_probs.backward(slopes)
    return counter.get_total_flops()


def sliced_errors(name: str) -> dict[str, float]:
    """A loss whose trajectories are cut over the ranks, position by position, against the same loss on one."""
    loss, group = policy_loss(name), dist.group.WORLD
    sample = draw_sample(loss)
    expected_loss, expected_gradient = loss_and_gradient(loss, sample)
    positions = (sample.batch_positions % dist.get_world_size() == dist.get_rank()).nonzero().squeeze(-1)
    segments = Segments(sample.segments.ids[positions], sample.segments.count, combine=sum_with_gradient(group))
    part = sample.select(positions, segments)
    log_probs = part.log_probs.clone().requires_grad_()
    total = (token_losses(loss, part, log_probs) * part.token_weights).sum()
    total.backward()
    total = total.detach()
    dist.all_reduce(total)
    return {
        "loss": relative(total, expected_loss),
        "gradient": relative(torch.where(part.mask, log_probs.grad, 0.0), expected_gradient[positions]),
    }


def worst_errors() -> dict[str, dict[str, float]]:
    """Of every case and every sliced loss, over all ranks."""
    dist.init_process_group("gloo")
    errors = {case.name: head_errors(case) for case in HEAD_CASES}
    errors |= {name: sliced_errors(name) for name in SLICED_LOSSES}
    whole = products_backward(idle=0)
    assert whole == 3 * 2 * 12 * 16 * HIDDEN  # the logits again, and the two products of the gradients
    errors["products"] = {f"idle={idle}": products_backward(idle) / whole for idle in (3, 6, 12)}
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, errors)
    dist.destroy_process_group()
    return {name: {k: max(rank[name][k] for rank in everyone) for k in errors[name]} for name in errors}
