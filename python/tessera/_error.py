class Error(RuntimeError):
    """What every failed call raises. `status` is the C ABI's name for it: invalid_argument, unsupported, ..."""

    def __init__(self, sentence, status="invalid_argument"):
        super().__init__(sentence)
        self.status = status
