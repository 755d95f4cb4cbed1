"""The Megatron room: everything that knows megatron-core. Importing it makes an unmodified megatron-core importable."""

from mppo.megatron import platform

platform.prepare()
