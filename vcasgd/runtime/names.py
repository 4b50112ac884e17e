"""Names that several of the loops must agree on."""


def epoch_pin(epoch: int) -> str:
    """The snapshot at the end of an epoch (1, 2, …) is kept under this name."""
    return f"epoch-{epoch}"
