"""A sample of what ci/cuda_kernels.py compiles. NVRTC takes other branches of kernels than compilers of the host."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from mpicoll.buffers.kernels import Source

SCRIPT = Path(__file__).resolve().parents[2] / "ci" / "cuda_kernels.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cuda_kernels", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        module.find_nvrtc()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    return module


def test_a_sample_compiles(script: ModuleType) -> None:
    compiler = script.Compiler("sm_90")
    sources = list(script.list_kernels())
    assert len({one.name for one in sources}) == len(sources)
    for source in sources[::60]:
        assert compiler.compile(source) is None


def test_what_does_not_compile_is_told(script: ModuleType) -> None:
    wrong = Source(name="wrong", parameters=("n", "p0"), operation="no_such_function(i);", preamble="")
    assert 'identifier "no_such_function" is undefined' in script.Compiler("sm_90").compile(wrong)
