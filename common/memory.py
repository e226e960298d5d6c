"""The memory that a process may still take, and errors that say there is none left."""

import contextlib
import os
import resource
from pathlib import Path


def available_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process may still allocate: limited by the machine, its own limit and its
    control groups."""
    page, limit = os.sysconf("SC_PAGE_SIZE"), resource.getrlimit(resource.RLIMIT_AS)[0]
    rooms = []
    if limit != resource.RLIM_INFINITY:
        rooms += [limit - int(line.split()[0]) * page for line in _lines(proc / "self" / "statm")]
    rooms += [
        int(line.split()[1]) * 1024
        for line in _lines(proc / "meminfo")
        if line.startswith("MemAvailable:")
    ]
    for line in _lines(proc / "self" / "cgroup"):
        if line.startswith("0::"):  # version 2 of control groups: "0::/a/b"
            here = cgroups / line[3:].strip("/")
            for group in [here, *here.parents]:
                if group.is_relative_to(cgroups):
                    rooms += _group_room(group)
    return max(0, min(rooms, default=os.sysconf("SC_PHYS_PAGES") * page))


def out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the device or the machine is out of memory."""
    if isinstance(error, MemoryError):
        return True
    signs = [
        "can't allocate memory",
        "not enough memory",
        "out of memory",
        "CUBLAS_STATUS_ALLOC_FAILED",
    ]
    signs += (
        "failed to map segment",
        "could not create a primitive\n",
    )  # of the loader of libraries; of oneDNN
    return isinstance(error, RuntimeError | ImportError) and any(
        sign in f"{error}\n" for sign in signs
    )


def _group_room(group: Path) -> list[int]:
    """Bytes that a control group may still allocate, counting its file cache as free; empty if it
    has no limit."""
    with contextlib.suppress(OSError, ValueError):  # "max" is not a number
        cache = dict(line.split() for line in _lines(group / "memory.stat")).get("inactive_file", 0)
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        return [limit - used + int(cache)]
    return []


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
