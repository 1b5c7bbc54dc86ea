"""The report as one self-contained HTML file, and its pictures."""
