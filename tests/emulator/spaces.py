"""Address spaces, checked by clang's OpenCL C++ mode with the generic space turned off: Metal's rules, off a Mac."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

PRELUDE = """
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
typedef unsigned int uint; typedef unsigned short ushort; typedef __SIZE_TYPE__ size_t;
typedef int int32_t; typedef uint uint32_t; typedef half float16_t; typedef half bfloat16_t;
typedef uint uint2 __attribute__((ext_vector_type(2))); typedef uint uint3 __attribute__((ext_vector_type(3)));
typedef uint uint4 __attribute__((ext_vector_type(4)));
typedef float float2 __attribute__((ext_vector_type(2))); typedef float float4 __attribute__((ext_vector_type(4)));
#define device __global
#define constant __constant
#define thread __private
#define threadgroup __local
float fma(float a, float b, float c);
float simd_shuffle_xor(float value, uint mask);
template <typename To, typename From> To as_type(From value);
namespace mem_flags { enum Flags { mem_threadgroup }; }
void threadgroup_barrier(mem_flags::Flags flags);
void simdgroup_multiply_accumulate(__private float2& d, float2 a, float2 b, float2 c);
"""
FLAGS = [
    *("-x", "clcpp", "-cl-std=clc++2021", "-target", "spir64", "-fsyntax-only", "-cl-no-stdinc", "-Wno-everything"),
    *("-Xclang", "-cl-ext=-__opencl_c_generic_address_space,-__opencl_c_pipes,-__opencl_c_device_enqueue"),
]
PARAMETER = re.compile(r"(.*?\w+) \[\[(?:buffer\(\d+\)|(\w+))\]\](?:,\n|\))")


def complaints(text: str) -> str:
    """What clang says against the recorded text of a kernel; empty if nothing."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cl"
        path.write_text(plain(text), encoding="utf-8")
        command = [sys.executable, "-m", "ziglang", "clang", *FLAGS, str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stderr


def plain(text: str) -> str:
    """The recorded text without its template: parameters become constants of the kernel."""
    text = re.sub(r"^#include <metal_.*$|^#pragma METAL.*$", "", text, flags=re.M)
    # Class objects do not copy in this mode; a matrix stands for the pair of elements that a lane holds.
    text = text.replace("simdgroup_matrix<float, 8, 8>", "float2").replace(".thread_elements()", "")
    head, rest = text.split("template <", 1)
    names, rest = rest.split(">\n[[kernel]] void ", 1)
    signature, rest = rest.split(") {\n", 1)
    body, instance = rest.split("\ntemplate [[host_name", 1)
    values = re.search(r"decltype\(\w+<(.*?)>\)", instance)
    assert values, "no instantiation in the text"
    constants = "".join(
        f"  typedef {value} {name.split()[1]};\n" if name.startswith("typename") else f"  constexpr {name} = {value};\n"
        for name, value in zip(names.split(", "), values[1].split(", "), strict=True)
    )
    kernel_name, parameters = signature.split("(", 1)
    found = PARAMETER.findall(parameters + ")")
    arguments = ", ".join(p.strip() for p, attribute in found if not attribute)
    positions = "".join(f"  {p.strip()} = 0;\n" for p, attribute in found if attribute)
    return f"{PRELUDE}\n{head}kernel void {kernel_name}({arguments}) {{\n{positions}{constants}{body}"
