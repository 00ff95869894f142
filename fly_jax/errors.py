"""The one exception: the command line prints it as a sentence and ends with exit status 2."""


class FlyJaxError(ValueError):
    """An error in one sentence: what was given, what is needed and what to do."""


def file_trouble(error: OSError) -> str:
    """A sentence for a file that could not be read or written, where there is no better one."""
    # NumPy's errors have no number.
    unnamed = "standard output or a file" if error.errno else "A file"
    return (
        f"{error.filename or unnamed} could not be read or written "
        f"({error.strerror or error}); check the disk's space and the path's permissions, then "
        "start again."
    )
