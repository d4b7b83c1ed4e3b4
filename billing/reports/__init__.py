"""Reports read what was used, what it cost and what it will cost; they write nothing."""
