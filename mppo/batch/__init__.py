"""The batch room: trajectories, packing and plans. Pure Python and tensors, no process groups."""
