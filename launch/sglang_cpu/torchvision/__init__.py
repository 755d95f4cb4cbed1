"""Stand-in front of the real torchvision, whose wheel is a build for CUDA.

With a torch for the CPU its compiled part does not load, and then its Python part fails to import, since it registers
shapes for two operators that nobody defined. This declares the two, and hands over to the real package. SGLang imports
it for models that read images.
"""

import contextlib
import importlib.machinery
import importlib.util
import os
import sys

import torch

for operator in ("nms", "qnms"):
    with contextlib.suppress(RuntimeError):  # already declared
        torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

_stand_ins = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_spec = importlib.machinery.PathFinder.find_spec(
    "torchvision", [path for path in sys.path if path and os.path.abspath(path) != _stand_ins]
)
if _spec is None:
    raise ImportError("the real torchvision is not installed")
_real = importlib.util.module_from_spec(_spec)
sys.modules["torchvision"] = _real
_spec.loader.exec_module(_real)
