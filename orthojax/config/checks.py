"""How a config refuses a value."""

from orthojax.errors import UserError


def require(holds: bool, problem: str, allowed: str = "") -> None:
    """Raises a UserError that names the problem and what is allowed, unless `holds`."""
    if not holds:
        raise UserError(problem, allowed=allowed)
