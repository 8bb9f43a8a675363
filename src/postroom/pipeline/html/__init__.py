"""The report as one HTML file: words, drawings and the page around them, without a line of JavaScript."""
