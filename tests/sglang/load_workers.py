"""Loads model folders as the tensor-parallel workers of an SGLang server would, and saves every worker's parameters.

Runs in SGLang's own environment: load_workers.py OUT TP EP FOLDER...   ->   OUT/<folder name>-<rank>.pt
"""

import sys
from pathlib import Path

import torch
import torch.multiprocessing


def main(out: Path, tp: int, ep: int, folders: list[str]) -> None:
    torch.multiprocessing.spawn(worker, (out, tp, ep, folders), nprocs=tp)


def worker(rank: int, out: Path, tp: int, ep: int, folders: list[str]) -> None:
    """What `sglang.srt.weight_cache.daemon` does to load a model outside of a server, on CPU."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.dp_attention import init_dp_gathered_buffer, initialize_dp_attention
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.model_loader.loader import get_model_loader
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    torch.set_num_threads(1)
    for folder in folders:
        arguments = ServerArgs(
            model_path=folder,
            device="cpu",
            tp_size=tp,
            ep_size=ep,
            dtype="float32",
            attention_backend="torch_native",
            sampling_backend="pytorch",
            disable_cuda_graph=True,
        )
        publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=rank))
        initialize_moe_config()
        config = ModelConfig(model_path=folder, dtype="float32")
        if not torch.distributed.is_initialized():
            join(rank, tp, out)
        initialize_dp_attention(arguments)
        init_dp_gathered_buffer(config)
        load_config = LoadConfig(tp_rank=rank)
        loader = get_model_loader(load_config=load_config, model_config=config)
        model = loader.load_model(model_config=config, device_config=DeviceConfig("cpu", rank))
        parameters = {name: parameter.data.clone() for name, parameter in model.named_parameters()}
        torch.save(parameters, out / f"{Path(folder).name}-{rank}.pt")


def join(rank: int, tp: int, out: Path) -> None:
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel

    init_distributed_environment(
        world_size=tp,
        rank=rank,
        local_rank=rank,
        distributed_init_method=f"file://{out}/rendezvous",
        backend="gloo",
    )
    initialize_model_parallel()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
