"""The planning room: what a configuration will do and what it costs, without launching it."""
