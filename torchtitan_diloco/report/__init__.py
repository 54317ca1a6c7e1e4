"""Report about one or several runs, from the files that they write."""
