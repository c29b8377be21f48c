"""The update of running statistics: one more launch after those of a norm."""
