"""The whole_set family: a program, or a team of programs, takes one set at a time and reads it row after row."""
