class Error(RuntimeError):
    """Raised by every call that fails. `status` is its name in the C ABI: invalid_argument, unsupported, ..."""

    def __init__(self, message, status="invalid_argument"):
        super().__init__(message)
        self.status = status
