"""`outrider`, and `python -m outrider`."""

from typing import NoReturn

from outrider.cli.interrupts import ending_at_once


def main() -> NoReturn:
    """The command line."""
    with ending_at_once():
        from outrider.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
