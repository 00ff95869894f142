"""Folders that `convert` writes: an Orbax checkpoint for each group of parameters.

config.json, tokenizer files    as in the source
conversion.json                 what was converted into what; once all is there, every file
orbax/embedding, orbax/layer_000, ...
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fly_jax.errors import FlyJaxError
from fly_jax.models import architectures
from fly_jax.models.architectures import Group, LlamaConfig, ParameterSpec, parameter_specs
from fly_jax.models.llama import parameter_sharding
from fly_jax.sharding.rules import Layout

StoredType = Literal["bfloat16", "float32", "int8"]

_ORBAX = "orbax"
# A folder in which a conversion has begun has this file.
RECORD = "conversion.json"
# A device reads its part of a matrix in whole chunks.
_CHUNK_BYTES = 2**24
_AGAIN = "remove the folder and convert again"


@dataclasses.dataclass(frozen=True)
class Record:
    """The content of `conversion.json`."""

    config: dict[str, Any]  # as in a Hugging Face `config.json`
    source: dict[str, list[int]]  # size and time of change of each file of the weights, by its path
    dtype: StoredType  # of the stored matrices; with int8, all else is float32
    files: dict[str, int] | None = None  # sizes of those below `orbax/`; None while not finished

    def write(self, folder: Path) -> None:
        """Replaces the folder's record as a whole."""
        partial = folder / f"{RECORD}.partial"
        partial.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")
        partial.replace(folder / RECORD)


def read_record(folder: Path) -> Record:
    """The folder's record; raises FlyJaxError where it is damaged."""
    try:
        return Record(**json.loads((folder / RECORD).read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise FlyJaxError(f"{folder / RECORD} is damaged ({error}); {_AGAIN}.") from error


def group_folder(folder: Path, group: Group) -> Path:
    """The folder of a group's Orbax checkpoint; it exists only as a whole."""
    return folder / _ORBAX / group.name


def write_group(folder: Path, group: Group, parts: dict[str, Array]) -> None:
    """Writes a group, which appears when it is whole; FlyJaxError for a full disk."""
    from orbax.checkpoint import v1 as ocp  # in half a second

    context = ocp.Context()
    context.array_options.saving.storage_options.chunk_byte_size = _CHUNK_BYTES
    context.array_options.saving.use_compression = False  # weights hardly shrink
    own = group_folder(folder, group)
    try:
        with context:
            ocp.save(own.absolute(), parts)
    except (OSError, ValueError) as error:  # TensorStore reports a full disk as the latter
        raise FlyJaxError(
            f"{own} cannot be written ({_short(error)}); make room, or give another --output."
        ) from error


def stored_files(folder: Path) -> dict[str, int]:
    """Size in bytes of every file below `orbax/`, by its path in the folder."""
    files = filter(Path.is_file, sorted((folder / _ORBAX).rglob("*")))
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}


class ConvertedSource:
    """A folder that `convert` has written; each process reads what its devices take."""

    def __init__(self, folder: Path) -> None:
        """Checks the folder without reading a weight.

        FlyJaxError for an unfinished conversion, a file that is missing or has another size, or
        the `config.json` of another model.
        """
        self._folder = folder
        record = read_record(folder)
        if record.files is None:
            raise FlyJaxError(
                f"{folder} holds a conversion that was not finished; run the same convert command "
                "again, which goes on where it stopped."
            )
        self.config = architectures.read_config(folder)
        self.int8 = record.dtype == "int8"
        self._width = jnp.dtype(jnp.float32 if self.int8 else record.dtype)
        for name, size in record.files.items():
            path = folder / name
            there = path.stat().st_size if path.is_file() else None
            if there != size:
                found = "does not exist" if there is None else f"has {there} bytes"
                raise FlyJaxError(
                    f"{path} {found}, and {RECORD} says {size} bytes; copy it again, or {_AGAIN}."
                )
        self._check_shapes(architectures.config_of(record.config, str(folder / RECORD)))

    @staticmethod
    def arranged(name: str, stored: Array, spec: ParameterSpec) -> Array:
        """Returns parameters as they are: they are stored as they are used."""
        return stored

    def read(self, group: Group, layout: Layout | None) -> dict[str, Array]:
        """Reads the group's arrays, each to where it stays."""
        from orbax.checkpoint import v1 as ocp

        own = group_folder(self._folder, group)
        abstract = {}
        for name, spec in group.specs(self.config, int8=self.int8).items():
            where, dtype = parameter_sharding(layout, spec), spec.dtype or self._width
            abstract[name] = jax.ShapeDtypeStruct(spec.shape, dtype, sharding=where)
        try:
            # No bound on what is read at once: Orbax refuses any single array above one.
            return ocp.load(own.absolute(), abstract)
        except Exception as error:  # TensorStore's have no class of their own
            raise FlyJaxError(
                f"The checkpoint {own} is damaged ({_short(error)}); copy it again, or {_AGAIN}."
            ) from error

    def describe(self, group: Group, name: str) -> str:
        """The array and its checkpoint, in words."""
        return f"The array {name} in {group_folder(self._folder, group)}"

    def _check_shapes(self, written: LlamaConfig) -> None:
        """Raises FlyJaxError where config.json asks for other shapes than the conversion wrote."""
        there, asked = both = parameter_specs(written), parameter_specs(self.config)
        for name in there | asked:
            found, wanted = (list(of[name].shape) if name in of else "absent" for of in both)
            if found != wanted:
                raise FlyJaxError(
                    f"The parameter {name} in {self._folder / _ORBAX} is {found}; config.json asks "
                    f"for {wanted}: give the one that was there, or {_AGAIN}."
                )
        if written.architecture != self.config.architecture:
            raise FlyJaxError(
                f"{self._folder / 'config.json'} describes a model of type "
                f"'{self.config.architecture}', and the weights are of type "
                f"'{written.architecture}': give the one that was there, or {_AGAIN}."
            )


def _short(error: Exception) -> str:
    """The beginning of an error, which can be a page."""
    return " ".join(str(error).split())[:120].rstrip(". ")
