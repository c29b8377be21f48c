"""One set at a time, row after row, by one program or by a team."""
