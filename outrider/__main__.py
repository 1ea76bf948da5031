"""`outrider`, and `python -m outrider`."""

import signal
from typing import NoReturn


def main() -> NoReturn:
    """The command line. Ctrl-C while it is still being imported ends the process at once, without a traceback."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from outrider.cli.main import main as run

    signal.signal(signal.SIGINT, before)
    run()


if __name__ == "__main__":
    main()
