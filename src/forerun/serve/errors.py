"""What a client may be told, in the shape OpenAI's clients read."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from forerun.errors import ForerunError

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    501: "not_implemented_error",
    503: "unavailable_error",
}


class ApiError(ForerunError):
    """An answer that is an error.

    Args:
        status: of HTTP. Deterministic refusals are 400 or 501, never 429 or 5xx that clients retry.
        message: what was wrong, the value seen, and how to fix it.
        param: the field of the request that is to blame.
        code: a word for programs.
        retry_after: seconds after which it may work, sent as a header.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after

    def to_json(self) -> dict[str, Any]:
        """The body: ``{"error": {"message", "type", "param", "code"}}``."""
        kind = KINDS.get(self.status, "server_error" if self.status >= 500 else KINDS[400])
        # Half a surrogate pair, which JSON can carry and UTF-8 cannot, must not break the answer.
        message = str(self).encode("utf-8", "backslashreplace").decode()
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Of the answer; openai's clients retry 501 unless they are told not to."""
        if self.retry_after is not None:
            return {"retry-after": str(self.retry_after)}
        if self.status == 408:  # what is still to come must not be taken for a request
            return {"connection": "close"}
        return {"x-should-retry": "false"} if self.status == 501 else {}


def bad(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Status 400: it is wrong for good."""
    return ApiError(400, message, param, code)


def unsupported(what: str, param: str) -> ApiError:
    """Status 501: known, and not here."""
    return ApiError(501, f"{what} not supported by this server", param, "not_supported")


@contextmanager
def blaming(param: str | None) -> Iterator[None]:
    """Tell what is refused here as the fault of a field."""
    try:
        yield
    except ApiError:
        raise
    except ForerunError as error:
        raise bad(str(error), param) from error
