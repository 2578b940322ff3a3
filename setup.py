"""The one part of the package that is compiled; everything else about it stands in pyproject.toml.

Optional: where no C++ compiler is found the install goes on, and torch's own products are used.
"""

from pathlib import Path

from setuptools import Extension, setup

NATIVE = "services/greenroom/moe/native"

setup(
    ext_modules=[
        Extension(
            "greenroom.moe.native._rows",
            [f"{NATIVE}/rows.cpp"],
            depends=sorted(map(str, Path(NATIVE).glob("*.inc"))),
            language="c++",
            # GCC warns of its own headers: intrinsics that leave a vector undefined.
            extra_compile_args=["-O3", "-std=c++17", "-Wno-psabi", "-Wno-uninitialized", "-Wno-maybe-uninitialized"],
            optional=True,
        )
    ]
)
