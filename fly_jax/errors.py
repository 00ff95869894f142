"""The one exception that the command line turns into a sentence and exit status 2."""


class FlyJaxError(ValueError):
    """What was given, what is needed and what to do, in one sentence.

    Raised by every check of input in the library; `fly_jax.launch` prints it without a
    traceback and ends with status 2.
    """
