"""The rollout room: prompts, engines that answer them, and rewards."""
