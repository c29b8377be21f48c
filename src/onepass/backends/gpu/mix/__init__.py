"""Small kernels that mix the statistics of several norms, and the gradients of these statistics."""
