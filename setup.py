"""Metadata and dependencies of fly_jax; the build system and the tools are in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

_NOTEBOOK = ["ipykernel>=6.29", "nbclient>=0.10", "nbformat>=5.10"]
_BENCH = ["httpx>=0.27", "matplotlib>=3.9"]
_SERVE = ["fastapi>=0.115", "prometheus-client>=0.20", "uvicorn>=0.30"]

setup(
    name="fly_jax",
    version="0.1.0",  # the only place: fly_jax asks importlib.metadata, a test reads CHANGELOG.md
    description="FLy, training-free loosely speculative decoding in JAX",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    # The root also holds tests/ and the links models, sharding and launch, which are these
    # packages under a second name.
    packages=find_packages(include=["fly_jax", "fly_jax.*"]),
    include_package_data=False,
    package_data={
        # fly_jax/configs is a link to configs/; a built wheel carries the files themselves.
        "fly_jax": ["py.typed", "__init__.pyi", "configs/*.toml", "configs/*.json"],
        "fly_jax.models": ["embedded/**/*", "presets.toml"],
        "fly_jax.models.checkpoints": ["hugging_face.toml"],
        "fly_jax.evaluation": ["colours.css"],
        "fly_jax.launch": ["page.html", "report.html"],
        "fly_jax.sharding": ["chips.toml"],
        "fly_jax.serving.http": ["protocol.toml", "try_it.html"],
    },
    install_requires=[
        "absl-py>=2.1",
        "flax>=0.12.8",
        "gguf>=0.17",
        "huggingface-hub>=1.3",
        "jax>=0.10",
        "jaxtyping>=0.3",
        "jinja2>=3.1",  # chat templates, and the page of an audit
        "lazy-loader>=0.4",
        "ml-dtypes>=0.5",
        "numpy>=2.0",
        "optax>=0.2.6",
        "orbax-checkpoint>=0.11.30,<0.13",
        "protobuf>=5",  # for SentencePiece models that are made from GGUF files
        "qwix>=0.1.2",
        "safetensors>=0.6",
        "sentencepiece>=0.2",
        "tokenizers>=0.22.1",
        "tqdm>=4.66",
        "transformers>=5.0",
    ],
    extras_require={
        "tpu": ["jax[tpu]"],
        "cuda": ["jax[cuda12]"],
        "cuda13": ["jax[cuda13]"],
        "vllm": [],  # the entry point below is always there: docs/integrations.md
        "notebooks": _NOTEBOOK,
        "serve": _SERVE,
        "bench": _BENCH,
        "eval": ["lm_eval[ifeval]>=0.4.13"],
        "test": [
            *_NOTEBOOK,
            *_SERVE,
            *_BENCH,
            "beartype>=0.22",  # with it tests check the shapes that annotations name
            "hypothesis>=6.100",
            "zstandard",  # by which JAX keeps programs in less time
            # The planner's tests compile for TPUs; libtpu is made for this platform alone.
            'jax[tpu]; sys_platform == "linux" and platform_machine == "x86_64"',
            "mypy==2.*",
            "openai>=2",
            "pip>=23.1",
            "pyyaml>=6",
            "pytest>=8.2",
            "pytest-xdist>=3.6",
            "ruff==0.17.*",  # its formatting changes from minor to minor version
            "scipy>=1.14",
            "setuptools>=77",
            "types-tqdm",
        ],
    },
    entry_points={
        "console_scripts": ["fly_jax = fly_jax.launch.__main__:run"],
        "vllm.general_plugins": ["fly_jax = fly_jax.integrations.vllm_tpu.plugin:register"],
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
