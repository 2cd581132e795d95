"""Packaging of longctx-patch.

The folders `cli` and `recipes` stand at the top of the repository, where people look for them, and
are installed as `longctx_patch.cli` and `longctx_patch.recipes`: no top-level module of a common
name is ever installed.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
MOVED_FOLDERS = {"cli": "longctx_patch.cli", "recipes": "longctx_patch.recipes"}

DRAW = ["matplotlib"]
EVAL = ["nltk", "wonderwords"]  # RULER's sentences and words
FOUR_BITS = ["bitsandbytes>=0.48"]
TRL = ["trl>=1.16"]
DEV = [
    "build",
    "hypothesis",
    "mypy",
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "ruff",
    "tensorboard",
    "types-PyYAML",
    *DRAW,
    *EVAL,
    *FOUR_BITS,
    *TRL,
]


def version() -> str:
    """The version that the package names, read without importing it."""
    text = (ROOT / "longctx_patch" / "__init__.py").read_text(encoding="utf-8")
    (found,) = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    return str(found)


def all_packages() -> list[str]:
    """Names of all packages to install, those of the moved folders under their new names."""
    packages = find_packages(include=["longctx_patch", "longctx_patch.*"])
    for folder, name in MOVED_FOLDERS.items():
        packages.append(name)
        packages.extend(f"{name}.{child}" for child in find_packages(folder))
    return packages


def long_description() -> str:
    """The README, empty while there is none (a source checkout may be partial)."""
    readme = ROOT / "README.md"
    return readme.read_text(encoding="utf-8") if readme.exists() else ""


setup(
    name="longctx-patch",
    version=version(),
    description="Train Hugging Face models on sequences cut over several GPUs, with exact numbers",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    author="The maintainers of longctx-patch",
    keywords="long context, sequence parallelism, ring attention, Ulysses, transformers, FSDP2",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=all_packages(),
    package_dir={name: folder for folder, name in MOVED_FOLDERS.items()},
    package_data={
        "longctx_patch": ["py.typed"],
        "longctx_patch.recipes": ["accelerate/*.yaml", "slurm/*.sh"],
    },
    install_requires=[
        # Tested versions: longctx_patch/rules/versions.py.
        "torch>=2.11,<3",
        "transformers>=5.17,<5.25",
        "accelerate>=1.15,<2",
        "peft>=0.21,<1",
        "click",
        "datasets>=4",  # reads and keeps what every recipe trains on
        "numpy",
        "packaging",
        "psutil",
        "pyarrow",
        "PyYAML",
        "tokenizers",
        "tqdm",
    ],
    extras_require={
        "dev": DEV,
        "draw": DRAW,
        "eval": EVAL,
        # A pre-release whose functions may still change, so one version. [cu13] is the compiler for
        # CUDA 13, which torch 2.11 and later come with by default.
        "fa4": ["flash-attn-4[cu13]==4.0.0b36"],
        "fa4-cu12": ["flash-attn-4==4.0.0b36"],
        # Compiled from source on most platforms: torch first, then pip with --no-build-isolation.
        "fa2": ["flash-attn>=2.8,<3"],
        # Gated delta rules (Qwen3.5). tilelang has the kernel that is right on Hopper GPUs.
        "fla": ["flash-linear-attention>=0.6", "tilelang>=0.1.9"],
        "liger": ["liger-kernel>=0.8.5"],
        "site": ["mkdocs>=1.6,<2", "mkdocs-material>=9.7,<10"],  # `make site`
        "4bit": FOUR_BITS,
        "trl": TRL,
    },
    entry_points={"console_scripts": ["longctx = longctx_patch.cli.main:main"]},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Operating System :: MacOS",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
