"""Stand-in for triton, a gigabyte that has nothing to run on without a GPU.

SGLang defines Triton kernels on import, on every device, and launches none of them on the CPU. So here decorators give
back what they decorate, every name and submodule exists, and the few helpers that are called for their value work.
"""

import importlib.abc
import importlib.machinery
import sys
import types


class _AnyAttribute(type):
    """A class of which every attribute is such a class, for annotations and bases."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything


class _Anything(metaclass=_AnyAttribute):
    def __init__(self, *args, **kwargs):
        pass

    def __init_subclass__(cls, **kwargs):
        pass


class _Module(types.ModuleType):
    """Names in capitals are classes, all others submodules, which are decorators too."""

    def __init__(self, name):
        super().__init__(name)
        self.__path__, self.__file__ = [], __file__
        self.__spec__ = importlib.machinery.ModuleSpec(name, _FINDER, is_package=True)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        if name[:1].isupper():
            is_error = name.endswith(("Error", "Exception", "Resources"))
            value = type(name, (Exception,) if is_error else (_Anything,), {})
        else:
            value = sys.modules.get(full) or sys.modules.setdefault(full, _Module(full))
        setattr(self, name, value)
        return value

    def __call__(self, *args, **kwargs):
        """`@triton.jit`, and `@triton.autotune(...)`."""
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return lambda function: function

    def __bool__(self):
        return False

    def __iter__(self):
        return iter(())


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every submodule that is imported by name."""

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith("triton.") else None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


class _Config:
    def __init__(self, kwargs=None, **others):
        self.__dict__.update(kwargs=kwargs or {}, **others)


class _Constexpr:
    def __init__(self, value=None):
        self.value = value


_FINDER = _Finder()
sys.meta_path.insert(0, _FINDER)
_triton = _Module("triton")
_triton.__version__ = "3.0.0"
_triton.cdiv = lambda a, b: -(a // -b)
_triton.next_power_of_2 = lambda n: 1 << max(n - 1, 0).bit_length()
_triton.Config = _Config
sys.modules["triton"] = _triton
_triton.language = sys.modules["triton.language"] = _Module("triton.language")
_triton.language.constexpr = _Constexpr
