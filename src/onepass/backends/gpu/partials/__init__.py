"""What programs leave behind of a sum or of moments, and the kernels that add it up."""
