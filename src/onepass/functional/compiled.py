"""Passes `install_when_imported` on to `onepass.patch`, which may not import dispatch/.

It installs the graph pass that decides which norms onepass computes under torch.compile.
"""

from onepass.dispatch.inductor_install import install_when_imported

__all__ = ["install_when_imported"]
