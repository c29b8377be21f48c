"""Make inductor run our graph pass: at once if inductor is loaded, otherwise when it is imported.

Importing onepass does not do this. Patching a module does, and so does tracing a call of onepass.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from typing import Any

CONFIG = "torch._inductor.config"


def install() -> None:
    """Add our pass after any pass that the user has set, if inductor is loaded."""
    config: Any = sys.modules.get(CONFIG)
    if config is None or not hasattr(config, "pre_grad_custom_pass"):  # not yet imported, or not to the end
        return
    from .inductor_pass import NormPass

    if not isinstance(config.pre_grad_custom_pass, NormPass):
        config.pre_grad_custom_pass = NormPass(config.pre_grad_custom_pass)


def install_when_imported() -> None:
    """Call `install` now, or as soon as inductor is imported. Importing it here would take seconds, and few programs need it."""
    install()
    if CONFIG not in sys.modules and not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


class _AfterImport(MetaPathFinder):
    """An import hook. It calls `install` after inductor's configuration is imported, and removes itself."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != CONFIG:
            return None
        sys.meta_path.remove(self)
        spec: Any = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_install(module: Any) -> None:
                execute(module)
                install()

            spec.loader.exec_module = execute_and_install
        return spec
