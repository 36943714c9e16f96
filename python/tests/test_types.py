# SPDX-License-Identifier: Apache-2.0
"""Annotations are complete, they resolve, py.typed says so; torch is not imported before it is needed."""

import inspect
import os
import subprocess
import sys
import typing

import anchorkv
import pytest

LAZY = {"AnchorKVCache": "transformers", "AnchorKVPress": "kvpress"}


def functions(thing):
    """Functions whose signature a caller sees: of a class those that it defines itself."""
    if not inspect.isclass(thing):
        return [thing]
    own = {n: x for n, x in vars(thing).items() if n == "__init__" or not n.startswith("_")}
    found = [x.fget if isinstance(x, property) else getattr(x, "__func__", x) for x in own.values()]
    return [x for x in found if inspect.isfunction(x) and x.__module__ == thing.__module__]


@pytest.mark.parametrize("name", anchorkv.__all__)
def test_annotated(name):
    if name in LAZY:
        pytest.importorskip("torch")
        pytest.importorskip(LAZY[name])
    found = functions(getattr(anchorkv, name))
    assert found
    for function in found:
        hints = typing.get_type_hints(function)  # raises for a name that is not there
        wanted = [p.name for p in inspect.signature(function).parameters.values() if p.name not in ("self", "cls")]
        missing = {*wanted, "return"} - set(hints)
        assert not missing, f"{function.__qualname__}: {', '.join(sorted(missing))} without a type"


def test_marker():
    assert os.path.exists(os.path.join(os.path.dirname(anchorkv.__file__), "py.typed"))


def test_import_is_quick_and_without_torch():
    """Processor time of a fresh interpreter, so that a busy machine does not matter. Without numpy's own share, which is 0.3 s
    where its modules were never compiled to bytecode."""
    program = (
        "import sys, time, numpy; t = time.process_time(); import anchorkv; t = time.process_time() - t\n"
        "late = {'torch', 'transformers', 'kvpress', 'anchorkv.transformers_cache'} & set(sys.modules)\n"
        "assert not late, late\nprint(t)"
    )
    times = [float(subprocess.check_output([sys.executable, "-c", program])) for _ in range(3)]
    assert min(times) < 0.1, times


def test_lazy_names_are_found():
    assert set(LAZY) < set(anchorkv.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        anchorkv.nothing
