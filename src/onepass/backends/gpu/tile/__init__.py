"""Sets whose elements lie apart: memory is read across sets."""
