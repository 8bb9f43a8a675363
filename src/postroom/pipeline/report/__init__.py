"""The report: facts by SQL, findings from them, and one HTML file. No Spark."""
