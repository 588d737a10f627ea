"""Sources of the code that a model is made of, by which a resumed run notices changes.

A captured graph does not show everything: hooks on gradients, draws from Python's generator and writes to attributes
leave no trace in it. The check before step 0 finds them, and looks again when the code is another one.
"""

import functools
import hashlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from varuna.core.version import __version__
from varuna.partition.watching.own_code import OWN
from varuna.process.scripts import LIBRARIES

_VERSIONS = (("varuna", __version__), ("torch", str(torch.__version__)))
"""Packages whose versions stand for their files."""
_NOT_THEIRS = (*OWN, *LIBRARIES)


def source_digest(model: nn.Module, *functions: object) -> str:
    """Hash of the files that hold the classes of a model's modules, and ``functions``; and of the versions used.

    Args:
        model: of any device.
        functions: the user's, such as ``model=`` and ``loss=``; others are left out.
    """
    digest = hashlib.sha256(repr(_VERSIONS).encode())
    files = {file for each in model.modules() for kind in type(each).__mro__ if (file := _file_of_class(kind))}
    files.update(file for function in functions for file in _files_of(function))
    for file in sorted(files):
        if not file.startswith(OWN):
            digest.update(_content(file))
    return digest.hexdigest()


def function_digest(*functions: object) -> str:
    """Hash of the files that hold the user's functions."""
    return source_digest(nn.Module(), *functions)


def loaded_digest() -> str:
    """Hash of the user's own modules that are loaded now: of all that is in no library."""
    digest = hashlib.sha256()
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(".py") and not any(part in file for part in _NOT_THEIRS):
            digest.update(name.encode() + _content(file))
    return digest.hexdigest()


def _file_of_class(kind: type) -> str | None:
    return getattr(sys.modules.get(kind.__module__), "__file__", None)


def _files_of(function: object) -> Iterator[str]:
    """Files that define a function: a partial's function, a callable object's class."""
    if callable(function):
        function = inspect.unwrap(function)
    while isinstance(function, functools.partial):
        function = function.func
    code: Any = getattr(function, "__code__", None)
    file = code.co_filename if code is not None else _file_of_class(type(function))
    if function is not None and file:
        yield file


def _content(file: str) -> bytes:
    try:
        return hashlib.sha256(Path(file).read_bytes()).digest()
    except OSError:
        return b""
