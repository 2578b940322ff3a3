"""The one part of the package that is compiled; everything else about it stands in pyproject.toml.

Optional: where no C++ compiler is found the install goes on, and torch's own products are used.
"""

from setuptools import Extension, setup

NATIVE = "services/greenroom/moe/kernels/native"

setup(
    ext_modules=[
        Extension(
            "greenroom.moe.kernels.native._rows",
            [f"{NATIVE}/rows.cpp"],
            depends=[
                f"{NATIVE}/{name}.inc"
                for name in (
                    *("rows_kernel", "pair_products", "matrix_products", "float_products", "column_products"),
                    *("attention", "linear_floats", "mxfp4_products", "lossless_products"),
                    "lossless_encoding",
                )
            ],
            language="c++",
            # GCC warns of its own headers: intrinsics that leave a vector undefined.
            extra_compile_args=["-O3", "-std=c++17", "-Wno-psabi", "-Wno-uninitialized", "-Wno-maybe-uninitialized"],
            optional=True,
        )
    ]
)
