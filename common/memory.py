"""Errors that say that there is no memory left."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that the device or the machine is out of memory."""
    if isinstance(error, MemoryError):
        return True
    if not isinstance(error, RuntimeError | ImportError):
        return False
    signs = (
        "can't allocate memory",
        "not enough memory",
        "out of memory",
        "CUBLAS_STATUS_ALLOC_FAILED",
        "CUBLAS_STATUS_NOT_INITIALIZED",  # its workspace does not fit
        "failed to map segment",  # of the loader of libraries
        "could not create a primitive\n",  # of oneDNN
    )
    return any(sign in f"{error}\n" for sign in signs)
