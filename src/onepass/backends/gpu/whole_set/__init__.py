"""One set at a time, its rows one after another, by one program or by a team."""
