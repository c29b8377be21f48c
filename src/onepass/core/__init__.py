"""What a norm is: axes, views of memory, operands, moments, the definition. It imports no other folder of onepass."""
