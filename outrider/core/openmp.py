"""How long OpenMP's threads spin. Must be imported before torch, and must not import it."""

from __future__ import annotations

from collections.abc import Container, MutableMapping

SPIN_COUNT = "500"  # iterations; GNU's default is about 300,000


def bound_spinning(environ: MutableMapping[str, str], modules: Container[str]) -> None:
    """Let waiting OpenMP threads sleep after a short spin, unless the environment says how they wait.

    By default GNU's OpenMP, which torch's packages for Linux use, spins for milliseconds: beside another busy process,
    on the core that the awaited thread needs. It reads the environment once, when torch is imported; child processes
    inherit the setting. modules: the names of the modules imported already.
    """
    if "torch" not in modules and "OMP_WAIT_POLICY" not in environ:
        environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
