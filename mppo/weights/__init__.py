"""The weights room: who holds which slice of the model, and how slices get to others.

Tables (`architectures`, `sglang_layout`) say what a parameter is made of; layouts (`megatron_layout`, `sglang_layout`,
`whole_tensors`) say it for every rank or worker; a plan (`transfer_plan`, by shares `spread`) is the intersection of
two layouts; a transport carries it out on the trainer's live weights (`live_weights`). `load` and `export` are such
movements too.
"""
