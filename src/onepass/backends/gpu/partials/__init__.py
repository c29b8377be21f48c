"""The launches that combine partial results: moments of parts of sets, and partial sums of gradients."""
