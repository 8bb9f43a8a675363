"""The report: one HTML file without JavaScript, drawn from the tables."""
