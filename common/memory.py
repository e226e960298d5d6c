"""Errors that say that there is no memory left."""


def out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the device or the machine is out of memory."""
    if isinstance(error, MemoryError):
        return True
    signs = (
        "can't allocate memory",
        "not enough memory",
        "out of memory",
        "CUBLAS_STATUS_ALLOC_FAILED",
        "failed to map segment",  # of the loader of libraries
        "could not create a primitive\n",  # of oneDNN
    )
    return isinstance(error, RuntimeError | ImportError) and any(
        sign in f"{error}\n" for sign in signs
    )
