"""Shows that the order in which answers arrive, and who generated them, change no bit of an update."""
