"""The trainer room: the loop and its nine named steps."""
