"""Code of a user may raise anything: the one place that catches all of it, and hands it to the caller."""

from __future__ import annotations

from types import TracebackType


class UserCode:
    """``with UserCode() as ran:`` runs code of a user; afterwards ``ran.failed``, and ``ran.take()`` is what it raised.

    An interrupt and the cancellation of the task pass through; ``sys.exit`` is an error like any other.
    """

    __slots__ = ("_error",)

    def __init__(self) -> None:
        self._error: Exception | SystemExit | None = None

    def __enter__(self) -> UserCode:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, (Exception, SystemExit)):
            return False
        self._error = error
        return True

    @property
    def failed(self) -> bool:
        """Whether it raised; False again once the error was taken."""
        return self._error is not None

    def take(self) -> Exception | SystemExit:
        """Return the exception and forget it: a kept traceback would keep the arrays of its frames alive.

        Raises RuntimeError when it returned.
        """
        try:
            if self._error is None:
                raise RuntimeError("the code returned")
            return self._error
        finally:
            self._error = None
