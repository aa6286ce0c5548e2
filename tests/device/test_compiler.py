"""Source assembly, parameter blocks and compilation, on a machine that may have no GPU."""

import numpy as np
import pytest

from cuflash.device.compiler import ParameterBlock, assemble, compile_only, inline_includes

FILES = {
    "a.cu": '#include "x.cuh"\n#include "y.cuh"\nint a = x + y;\n',
    "x.cuh": "#pragma once\n#include <cuda_fp16.h>\nint x;\n",
    "y.cuh": '#pragma once\n#include "x.cuh"\nint y;\n',
}


def test_each_file_is_inlined_once_where_it_is_first_included():
    text = inline_includes("a.cu", FILES.__getitem__)
    lines = [line for line in text.splitlines() if line and not line.startswith("#line")]
    assert lines == ["#include <cuda_fp16.h>", "int x;", "int y;", "int a = x + y;"]


def test_compilers_are_told_the_original_lines():
    """The line after a directive has the number that the directive says, in its file."""
    lines = inline_includes("a.cu", FILES.__getitem__).splitlines()
    place, found = None, {}
    for line in lines:
        if line.startswith("#line"):
            _, number, name = line.split()
            place = [name.strip('"'), int(number)]
            continue
        if line.startswith("int"):
            found[line] = tuple(place)
        place[1] += 1
    assert found == {
        "int x;": ("x.cuh", 3),
        "int y;": ("y.cuh", 3),
        "int a = x + y;": ("a.cu", 3),
    }


def test_no_include_of_ours_is_left():
    for path in ("softmax/fused.cu", "softmax/backward.cu"):
        assert '#include "' not in assemble(path)


def test_an_include_that_is_not_there():
    with pytest.raises(FileNotFoundError, match=r"lib/missing\.cuh"):
        assemble("lib/missing.cuh")


def test_parameter_blocks_have_the_layout_of_c_structs():
    inner = ParameterBlock("Inner", {"flag": np.int8, "stride": (np.int64, (2,))})
    outer = ParameterBlock("Outer", {"n": np.int32, "inner": (inner, (2,)), "x": np.float32})
    assert inner.layout() == {"flag": 0, "stride": 8}
    assert outer.layout() == {
        "n": 0,
        "inner": 8,
        "inner[0].flag": 8,
        "inner[0].stride": 16,
        "inner[1].flag": 32,
        "inner[1].stride": 40,
        "x": 56,
    }
    assert outer.dtype.itemsize == 64
    assert outer.zeros().size == 1


def test_a_report_on_a_compiled_kernel():
    name = "cuflash::naive_maximum<float, cuflash::kPacked>"
    (report,) = compile_only("softmax/naive.cu", [name], "sm_80").values()
    assert 16 <= report.registers <= 128
    assert report[1:] == (0, 0, 0, 0, False)


def test_a_kernel_that_does_not_compile_is_an_error_with_the_log():
    with pytest.raises(RuntimeError, match=r"softmax/naive.cu for sm_80:\n(.|\n)*no_such_type"):
        compile_only("softmax/naive.cu", ["cuflash::naive_maximum<no_such_type>"], "sm_80")
