"""Build the double: ``python tools/cann_double/build.py <folder>``.

Makes ``libascendcl.so`` and the libraries that only have to exist, in ``<folder>``, unless they are
newer than the sources. Needs g++.
"""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
#: Libraries that torch_npu and Mooncake name; each pulls in the one that holds everything.
NAMES_ONLY = (
    "libacl_op_compiler.so",
    "libacl_tdt_channel.so",
    "libge_runner.so",
    "libgraph.so",
    "libhccl.so",
    "libllm_datadist.so",
    "libmetadef.so",
)
FLAGS = ("-std=c++17", "-O2", "-Wall", "-Wextra", "-fPIC", "-shared", "-pthread")


def build(folder: Path) -> Path:
    """Build into ``folder`` what is missing or old; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    sources = sorted(HERE.glob("*.cpp"))
    newest = max(path.stat().st_mtime for path in (*sources, HERE / "double.h"))
    library = folder / "libascendcl.so"
    if not library.exists() or library.stat().st_mtime < newest:
        command = ["g++", *FLAGS, "-Wl,-soname,libascendcl.so", *map(str, sources)]
        subprocess.run([*command, "-o", str(library)], check=True)
    for name in NAMES_ONLY:
        if not (folder / name).exists():
            link = ["-Wl,--no-as-needed", f"-L{folder}", "-lascendcl", f"-Wl,-soname,{name}"]
            command = ["g++", "-shared", "-x", "c++", "/dev/null", *link]
            subprocess.run([*command, "-o", str(folder / name)], check=True)
    return folder


if __name__ == "__main__":
    print(build(Path(sys.argv[1]).resolve()))
