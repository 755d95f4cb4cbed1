"""Ways in which the slices of a plan travel."""
