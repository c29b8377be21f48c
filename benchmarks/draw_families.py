"""Draws docs/families.svg: which elements one GPU program of each kernel family processes.

Run it with `python -m benchmarks.draw_families`. A set is the elements that share one mean and variance. Several programs
that share a set form a team, and are its members.
"""

from __future__ import annotations

from pathlib import Path

ROWS, COLUMNS, CELL = 8, 12, 13  # each panel shows memory as 8 rows of 12 squares, each 13 pixels wide
FIRST, SECOND, OTHER = "#4c78a8", "#9ecae9", "#e6e6e6"

# For each family: colored rectangles, one per program or part of a set, and two lines of caption. A rectangle is
# (color, first row, end row, first column, end column); the ends are exclusive.
PANELS = {
    "row": ([(FIRST, 0, 2, 0, 12)], "a program keeps whole sets,", "each one contiguous run"),
    "tile": ([(FIRST, 0, 8, 0, 3)], "a program keeps whole sets", "that lie side by side"),
    "whole_set": ([(FIRST, 0, 8, 0, 2)], "a set for a program or a team,", "row after row as it lies"),
    "team": ([(FIRST, 0, 4, 0, 6), (SECOND, 4, 8, 0, 6)], "members share sets and", "exchange their moments"),
    "ring": ([((FIRST, SECOND)[i % 2], 2 * i, 2 * i + 2, 0, 6) for i in range(4)], "members take blocks in turn,", "kept in shared memory"),
    "row_reread": ([(FIRST, 0, 1, 0, 6), (SECOND, 0, 1, 6, 12)], "a long run in parts: reduce,", "combine, then read again"),
    "tile_reread": ([(FIRST, 0, 4, 0, 6), (SECOND, 4, 8, 0, 6)], "columns in parts: reduce,", "combine, then read again"),
    "apply": ([(FIRST, 0, 8, 0, 12)], "statistics are given:", "one pass in any order"),
}  # fmt: skip


def panel(name: str, x: int, y: int) -> str:
    blocks, *caption = PANELS[name]
    found = [f'<text x="{x}" y="{y - 8}" font-size="14" font-weight="bold">{name}</text>']
    for row in range(ROWS):
        for column in range(COLUMNS):
            color = next((c for c, r0, r1, c0, c1 in blocks if r0 <= row < r1 and c0 <= column < c1), OTHER)
            found.append(f'<rect x="{x + column * CELL}" y="{y + row * CELL}" width="{CELL - 1}" height="{CELL - 1}" fill="{color}"/>')
    bottom = y + ROWS * CELL
    found += [f'<text x="{x}" y="{bottom + 14 * (i + 1)}" font-size="11">{line}</text>' for i, line in enumerate(caption)]
    return "\n".join(found)


def picture() -> str:
    width, height = COLUMNS * CELL + 40, ROWS * CELL + 70
    panels = [panel(name, 20 + i % 4 * width, 60 + i // 4 * height) for i, name in enumerate(PANELS)]
    title = "Memory as rows (reps) and columns (sets and runs). Dark: one program. Light: another member, or another part."
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{4 * width}" height="{2 * height + 40}" font-family="sans-serif">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n<text x="20" y="24" font-size="13">{title}</text>\n'
        + "\n".join(panels)
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    Path("docs/families.svg").write_text(picture())
