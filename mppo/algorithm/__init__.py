"""The algorithm room: pure tensor maths over packed `[T]` vectors. Imports torch and the registry only."""
