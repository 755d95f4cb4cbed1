"""transformers keeps the experts of a layer in two tensors, and writes them to disk one by one."""

from collections.abc import Iterable

from torch import Tensor

_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"


def on_disk(parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """The parameters of a transformers module under their names in its folder; those of experts are views.

    `experts.gate_up_proj [E, 2 F, H]` becomes `experts.N.gate_proj.weight` and `experts.N.up_proj.weight`, `[F, H]`;
    `experts.down_proj [E, H, F]` becomes `experts.N.down_proj.weight`.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in parameters:
        if name.endswith(_GATE_UP):
            prefix = name.removesuffix("gate_up_proj")
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                found |= {f"{prefix}{expert}.gate_proj.weight": gate, f"{prefix}{expert}.up_proj.weight": up}
        elif name.endswith(_DOWN):
            prefix = name.removesuffix("down_proj")
            found |= {f"{prefix}{expert}.down_proj.weight": down for expert, down in enumerate(tensor)}
        else:
            found[name] = tensor
    return found
