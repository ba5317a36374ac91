"""Libraries without functions in place of CUDA's, so that torch can be imported without them: python ci/stub_cuda.py

torch's wheel for CUDA is linked with libraries of several gigabytes, and calls none of them on a machine without a GPU.
Run this with the Python in whose environment torch was installed by `pip install --no-deps`. It needs gcc and binutils,
and the libraries that torch does call, which are small: `pip install cuda-toolkit[cudart,cupti]==VERSION`. The VERSION
is in torch's metadata, and `python ci/stub_cuda.py --requirements` prints what else torch requires.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import requires
from pathlib import Path

CALLED = "cudart|cupti"
"""The libraries that torch calls when it is imported."""

OF_CUDA = re.compile("(cu[A-Z]|cublas|cudnn|cufft|cufile|cusolver|cusparse|p?nccl|nvrtc|nvshmem)")
"""How names of CUDA's functions begin. Those of the runtime have a version, that of its library."""


def main(*options: str) -> None:
    if options == ("--requirements",):
        print("\n".join(list_requirements()))
        return
    folder = Path(sysconfig.get_path("purelib"), "torch", "lib")
    libraries = [*folder.glob("libtorch*.so"), folder / "libc10_cuda.so"]
    needed = {name for one in libraries for name in re.findall(r"NEEDED.*\[(.*)\]", output("readelf", "-d", one))}
    missing = sorted(name for name in needed if re.match("lib(cu|nccl|nv)", name) and not re.search(CALLED, name))
    symbols = {
        line.split()[1] for one in libraries for line in output("nm", "-D", "--undefined-only", one).splitlines()
    }
    versions: dict[str, set[str]] = {name: set() for name in missing}
    for symbol in symbols:
        name, _, version = symbol.partition("@")
        if OF_CUDA.match(name):
            # Without a version it may be in any of the libraries.
            owner = "libnvshmem_host.so.3" if version == "NVSHMEM" else version or missing[0]
            if owner in versions:
                versions[owner].add(name)
    for library, names in versions.items():
        compile_stub(folder / library, names)
    print(f"{len(missing)} libraries of CUDA are stubs: {', '.join(missing)}")


def list_requirements() -> list[str]:
    """Return what torch requires on a machine without a GPU, and the libraries of CUDA that are not stubs."""
    lines = [line.partition(";")[0].strip() for line in requires("torch") or () if "extra ==" not in line]
    others = [line for line in lines if not re.match("nvidia-|cuda-|triton", line)]
    version = next(line.partition("==")[2] for line in lines if line.startswith("cuda-toolkit["))
    return [*others, f"cuda-toolkit[{CALLED.replace('|', ',')}]=={version}"]


def compile_stub(library: Path, names: set[str]) -> None:
    """Compile a `library` that has the `names`, all with the version that torch asks for."""
    version = "NVSHMEM" if "nvshmem" in library.name else library.name
    with tempfile.TemporaryDirectory() as folder:
        source, script = Path(folder, "stub.c"), Path(folder, "versions")
        source.write_text("".join(f"char {name}[64];\n" for name in sorted(names)) + "static char none;\n")
        script.write_text(f"{version} {{ global: *; }};\n")
        options = ("-shared", "-fPIC", "-w", f"-Wl,-soname,{library.name}", f"-Wl,--version-script={script}")
        output("gcc", *options, "-o", library, source)


def output(*command: object) -> str:
    return subprocess.run([str(one) for one in command], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main(*sys.argv[1:])
