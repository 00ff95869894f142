"""The setup of JAX in a process: devices and meshes, and where compiled programs are kept."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import math
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path

import jax
from jax.experimental.mesh_utils import create_device_mesh
from jax.sharding import AxisType, Mesh

from fly_jax.errors import FlyJaxError

_GOOGLE = "0x1ae0"  # as a vendor of PCI devices, TPUs among them
_OFF = ("off", "none")  # given for a folder
AXES = ("data", "x", "y")
_DEFAULT_NAMES = {1: ("x",), 2: ("x", "y"), 3: ("data", "x", "y")}


@dataclasses.dataclass(frozen=True)
class MeshSpec:
    """Names and sizes of the axes of a mesh, the outermost first."""

    axes: tuple[tuple[str, int], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Name of each axis."""
        return tuple(name for name, _ in self.axes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Devices along each axis."""
        return tuple(size for _, size in self.axes)

    @property
    def num_devices(self) -> int:
        """Devices of the whole mesh."""
        return math.prod(self.sizes)

    def __str__(self) -> str:
        """The text that `parse_mesh` reads: `8x8`, or `data=2,x=4` where names are not usual."""
        if self.names == _DEFAULT_NAMES[len(self.axes)]:
            return "x".join(map(str, self.sizes))
        return ",".join(f"{name}={size}" for name, size in self.axes)


def parse_mesh(text: str) -> MeshSpec:
    """Reads `8` (x), `8x8` (x, y), `2x8x8` (data, x, y) or `data=2,y=8`; else a FlyJaxError."""
    parts = [part.partition("=") for part in text.replace(" ", "").split(",")]
    if "=" not in text:
        sizes = text.strip().split("x")
        names = _DEFAULT_NAMES.get(len(sizes), ())
        parts = [(name, "=", size) for name, size in zip(names, sizes, strict=False)]
    names = tuple(name for name, _, _ in parts)
    right_names = names and set(names) <= set(AXES) and len(set(names)) == len(names)
    if not right_names or not all(re.fullmatch("0*[1-9][0-9]{0,8}", size) for _, _, size in parts):
        raise FlyJaxError(
            f"'{text}' is not a mesh; it needs one to three positive sizes, or sizes with names "
            f"out of {', '.join(AXES)}: write 8x8, 2x8x8 or data=2,x=8,y=8."
        )
    return MeshSpec(tuple((name, int(size)) for name, _, size in parts))


# With more, starting the CPU backend takes minutes and all memory.
MOST_SIMULATED = 1024


def prepare_devices(spec: MeshSpec, num_processes: int) -> None:
    """Makes a CPU-only machine simulate the mesh's devices; it has no effect elsewhere.

    Of several processes each simulates its share; FlyJaxError where the mesh does not divide. Call
    it before anything touches a JAX backend: after that it changes nothing, and `create_mesh` says
    whether the devices suffice.
    """
    share, rest = divmod(spec.num_devices, num_processes)
    if rest:
        raise FlyJaxError(
            f"The mesh {spec} does not divide over {num_processes} processes, of which each "
            "needs the same number of devices; ask for another mesh, or start another number of "
            "processes."
        )
    with contextlib.suppress(RuntimeError):  # a backend is up
        jax.config.update("jax_num_cpu_devices", min(share, MOST_SIMULATED))
        if not jax.config.jax_platforms and _has_idle_libtpu():  # type: ignore[attr-defined]
            jax.config.update("jax_platforms", "cpu")


def _has_idle_libtpu() -> bool:
    """Tells whether libtpu is here without an accelerator, to plan: JAX would look for TPUs."""
    found = [importlib.util.find_spec(name) is not None for name in ("libtpu", "jax_plugins")]
    vendors = Path("/sys/bus/pci/devices").glob("*/vendor")
    may_have_tpu = any(path.read_text().strip() == _GOOGLE for path in vendors)
    return found == [True, False] and not may_have_tpu


def create_mesh(spec: MeshSpec) -> Mesh:
    """The mesh over the devices of this machine, or of all processes', with automatic sharding.

    A mesh of one device takes the first one of any machine; simulated devices may be more than the
    mesh has. Several processes need a mesh over all their devices. Raises FlyJaxError for another
    number of devices, or where the CPU backend was up before `prepare_devices` was called.
    """
    devices, needed, processes = jax.devices(), spec.num_devices, jax.process_count()
    kind = devices[0].platform
    if kind == "cpu" and needed > MOST_SIMULATED:
        raise FlyJaxError(
            f"The mesh {spec} needs {needed} devices and a CPU simulates at most {MOST_SIMULATED}; "
            "ask for a smaller mesh."
        )
    if kind == "cpu" and len(devices) < needed:
        raise FlyJaxError(
            f"The mesh {spec} needs {needed} devices and JAX has started with {len(devices)} "
            f"simulated on the CPU; call prepare_devices before anything else uses JAX, or ask for "
            f"a mesh of {len(devices)}."
        )
    have, also = f"the {processes} processes have", ""
    if processes == 1:
        have, also = "this machine has", ", or for 1x1; JAX_PLATFORMS=cpu simulates more"
    if needed != len(devices) and not (also and (kind == "cpu" or needed == 1)):
        raise FlyJaxError(
            f"The mesh {spec} needs {needed} devices and {have} {len(devices)} "
            f"({devices[0].device_kind}); ask for a mesh of {len(devices)}{also}."
        )
    return mesh_over(devices[:needed], spec)


def mesh_over(devices: Sequence[jax.Device], spec: MeshSpec) -> Mesh:
    """The mesh of these devices; an axis may be a part of an axis of a slice, or lie over two."""
    kinds = (AxisType.Auto,) * len(spec.axes)
    placed = create_device_mesh(spec.sizes, devices, allow_split_physical_axes=True)
    return Mesh(placed, spec.names, axis_types=kinds)


def describe(mesh: Mesh) -> str:
    """A line for people, such as `64 simulated devices (CPU) as mesh 8x8`."""
    spec, device = MeshSpec(tuple(mesh.shape.items())), mesh.devices.flat[0]
    count, processes, is_cpu = spec.num_devices, jax.process_count(), device.platform == "cpu"
    noun = "device" if count == 1 else "simulated devices" if is_cpu else "devices"
    kind = "CPU" if is_cpu else device.device_kind
    over = f" over {processes} processes" if processes > 1 else ""
    return f"{count} {noun} ({kind}) as mesh {spec}{over}"


VARIABLE = "FLY_JAX_COMPILATION_CACHE"
_LEAST_SECONDS_OF_JAX = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
# When the programs take more than this, those that were not read for longest are removed.
_MOST_BYTES = 4 * 2**30


def enable_compilation_cache(folder: str | Path | None = None) -> Path | None:
    """Keeps programs that are compiled from now on in a folder, and loads them from there.

    JAX's variable JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS leaves out those that compile faster.
    Call it before anything is compiled. The folder must be one that only trusted people can write
    to: what lies in it is run. Returns where the programs of this JAX and this kind of machine
    lie, or None, and raises FlyJaxError if it cannot write there. The folder may be "off" or "none"
    for no cache. None takes the environment variable FLY_JAX_COMPILATION_CACHE, else the folder of
    JAX_COMPILATION_CACHE_DIR as it is, else one of the user's own.
    """
    if (kept := kept_folder(folder, VARIABLE, "xla")) is None:
        jax.config.update("jax_enable_compilation_cache", False)
        return None
    given = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if given and not (folder or os.environ.get(VARIABLE)):
        path = Path(given)
    else:
        path = kept / _kind()
        make_folder(path, "Compiled programs", "compilation_cache")
        jax.config.update("jax_compilation_cache_dir", str(path))
        # Once for each command: JAX's own limit looks at every file before each program that it
        # keeps (a tenth of a second a program where a thousand lie there).
        forget_oldest(kept, _MOST_BYTES, f"jax-*-{'[0-9a-f]' * 12}/*")
    if _LEAST_SECONDS_OF_JAX not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return path


def _kind() -> str:
    """A name for what programs depend on and JAX's keys leave out: a CPU's instructions."""
    path = Path("/proc/cpuinfo")
    known = path.read_text(errors="replace") if path.exists() else ""
    features = next(iter(re.findall(r"^(?:flags|Features).*", known, re.MULTILINE)), "")
    text = f"{platform.machine()} {platform.processor()} {features}"
    return f"jax-{jax.__version__}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def kept_folder(given: str | Path | None, variable: str, name: str) -> Path | None:
    """The folder given, else the variable's, else the user's own; None for "off" or "none"."""
    wanted = str(given or os.environ.get(variable) or "")
    if wanted.lower() in _OFF:
        return None
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        if wanted:
            return Path(wanted).expanduser()
        folder = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    except RuntimeError as error:
        raise FlyJaxError(
            f"No home folder is known in which to keep {name}; set {variable} to a folder, or off."
        ) from error
    return folder / "fly_jax" / name


def make_folder(path: Path, what: str, flag: str) -> None:
    """Makes a folder that only its user reads; raises FlyJaxError where it cannot."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        reason = None if os.access(path, os.W_OK | os.X_OK) else "Permission denied"
    except OSError as error:
        reason = error.strerror
    if reason is not None:
        raise FlyJaxError(
            f"{what} cannot be kept in {path} ({reason}); give --{flag} another folder, or off."
        )


def forget_oldest(path: Path, most_bytes: int, names: str = "*") -> None:
    """Removes files of such names, those not read for longest, until few enough bytes are left."""
    found = []
    for file in path.glob(names):
        with contextlib.suppress(FileNotFoundError):  # another command removed it
            if file.is_file():  # JAX keeps a folder of XLA's here, too
                stat = file.stat()
                found.append((stat.st_atime, stat.st_size, file))
    kept = 0
    for _, size, file in sorted(found, reverse=True):
        kept += size
        if kept > most_bytes:
            with contextlib.suppress(OSError):  # of another user, in a folder of many
                file.unlink(missing_ok=True)
