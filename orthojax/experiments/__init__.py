"""Both papers' tables and figures, and comparisons beyond them, as studies: runs, columns, claims and pictures."""
