"""The errors that people see. Every message is one line that names the thing, the value seen, the limit and the remedy."""

from __future__ import annotations


class FlareError(Exception):
    """Base of all expected failures; `str(error)` is one line for people. `exit_code` is what a command ends with."""

    exit_code = 2


class CoreError(FlareError):
    """A core directory that may not be served: damaged, incomplete, or made for something else. Exit code 1."""

    exit_code = 1


class InputError(FlareError):
    """Input or environment that a command cannot work with: a checkpoint, an option, a compiler, a port. Exit code 2."""

    exit_code = 2


class SettingError(InputError):
    """What the setting of that name asks for cannot be had. The line begins with its value, but for a switch; who
    knows where that was given puts it before, see `Configuration.naming`."""

    def __init__(self, setting: str, message: str) -> None:
        super().__init__(message)
        self.setting = setting


class NoCore(SettingError):
    """No directory is at the path of a core."""

    def __init__(self, message: str) -> None:
        super().__init__("core", message)


class ReplayDead(FlareError):
    """A replay can run nothing any more: it was closed, or its device is lost. Every other exception of a replay's `step`
    and `sample` concerns that one call."""


class MaskError(FlareError):
    """A grammar that can say no more about a reply; the line may be shown to the client."""


class RequestError(FlareError):
    """A request that is refused. `param` and `code` follow the specification; `extra` joins the error object."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        extra: dict[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.param = param
        self.code = code
        self.extra = extra or {}
