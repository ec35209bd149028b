"""Every error a user can meet, one class each.

The message says what was given, what was allowed and what to do. `status` is the HTTP status the server answers with,
so that no other table of statuses exists. Our own bugs are `assert`, never one of these.
"""


class JaxInferError(Exception):
    """Root of all errors raised on purpose.

    Attributes:
      status: HTTP status for this class.
    """

    status = 500


class ConfigError(JaxInferError):
    """A configuration that cannot work: a bad value, an unknown name, or a size that does not fit."""

    status = 500


class CheckpointError(JaxInferError):
    """A model file that is missing, damaged or of an unknown kind."""

    status = 500


class RequestError(JaxInferError):
    """A request that is wrong in itself; the engine is fine.

    Attributes:
      param: name of the offending field, or None when no single field is to blame.
    """

    status = 400

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


class PromptTooLong(RequestError):
    """The prompt, or the prompt and its answer, exceed what the engine can ever hold."""


class UnsupportedParam(RequestError):
    """A parameter that is unknown, out of range, or not applied by this engine."""


class QueueFull(JaxInferError):
    """Admission is bounded and the bound is reached; try again later."""

    status = 429


class EngineDead(JaxInferError):
    """The engine has stopped and takes no more requests."""

    status = 503
