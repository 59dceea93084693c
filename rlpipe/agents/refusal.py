"""What the endpoint answers instead of tokens."""


class Refusal(Exception):
    """A request that cannot be served. The agent is told the sentence, with an HTTP status and OpenAI's error code."""

    def __init__(self, message: str, status: int = 400, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status = status
        self.code = code
