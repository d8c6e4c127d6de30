"""What an example says of itself when it ends: each thing that is not as it should be, and the exit status."""

import sys
from collections.abc import Iterable


def exit_status(checks: Iterable[tuple[bool, str]]) -> int:
    """Prints what is wrong, of pairs of whether it is so and what; 0 if nothing is."""
    wrong = [what for is_so, what in checks if is_so]
    for what in wrong:
        print(what, file=sys.stderr)
    return int(bool(wrong))
