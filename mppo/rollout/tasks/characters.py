"""Answers of the character presets, whose tokens are one character each but for two."""

import re

_SPECIAL = re.compile("<eos>|<pad>")


def characters(response: str) -> str:
    """The answer without the presets' special tokens, which are spelled with several characters."""
    return _SPECIAL.sub("", response)
