"""Builds the CPU kernels into the package where a C++ compiler is at hand. An install without one succeeds."""

from __future__ import annotations

import importlib.util
import os
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CustomBuildHook(BuildHookInterface[Any]):
    """A wheel with the library is one for this platform; without, it is one for all."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        build = _module(Path(self.root) / "outrider" / "native" / "build.py")
        build.uninstall()  # what an earlier build left must not be part of a wheel for all platforms
        if os.environ.get("OUTRIDER_NATIVE") == "0":
            return
        try:
            build.install()
        except build.BuildError as error:
            self.app.display_warning(f"without the CPU kernels, which are built on first use instead: {error}")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data.update(pure_python=False, tag=f"py3-none-{platform}")


def _module(file: Path) -> Any:
    """A module by its file: the package itself needs more than is installed while it is built."""
    spec = importlib.util.spec_from_file_location("outrider_native_build", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
