"""The check-loss room: the examination of a policy loss, registered or a user's own."""
