"""The weights room: one description of a model's parameters, from which loading, export and shard plans follow."""
