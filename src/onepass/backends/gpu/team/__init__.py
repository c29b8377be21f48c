"""The team family: programs that run at the same time share sets that are too large for one program."""
