"""What `onepass.patch` needs of torch.compile's graphs: the pass that decides which norms of patched modules onepass computes."""

from onepass.dispatch.inductor_install import install_when_imported

__all__ = ["install_when_imported"]
