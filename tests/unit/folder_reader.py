"""What a transformers, of whatever version, makes of model folders: prints it as JSON.

python tests/unit/folder_reader.py FOLDER...
"""

import json
import sys

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXT = "12+34=46;abc"


def read(folder: str) -> dict:
    """Log-probs of a text, its ids, and where a greedy continuation ends."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer(TEXT)["input_ids"]])
    with torch.no_grad():
        log_probs = model(ids).logits.float().log_softmax(-1)
        written = model.generate(ids, max_new_tokens=12, do_sample=False)
    return {
        "ids": ids[0].tolist(),
        "text": tokenizer.decode(ids[0]),
        "dtype": str(model.dtype),
        "log_probs": log_probs[0].gather(1, ids[0, :, None]).squeeze(1).tolist(),
        "written": written[0, ids.size(1) :].tolist(),
    }


if __name__ == "__main__":
    found = {folder: read(folder) for folder in sys.argv[1:]}
    print(json.dumps({"version": transformers.__version__, "folders": found}))
