"""What a norm is: axes, views of memory, operands, moments, the definition. Imports nothing of the rest."""
