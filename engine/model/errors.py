"""The one error of a model that cannot be served. Knows nothing of files or networks."""


class ModelError(Exception):
    """The model cannot be found, read or run; the message names the file, field or tensor that is to blame."""
