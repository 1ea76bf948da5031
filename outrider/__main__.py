"""`outrider`, and `python -m outrider`."""

from typing import NoReturn

from outrider.cli.interrupts import default_sigint


def main() -> NoReturn:
    """The command line."""
    with default_sigint():
        from outrider.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
