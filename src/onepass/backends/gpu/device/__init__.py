"""Device code that several kernels share. Equations cite docs/theory.md."""
