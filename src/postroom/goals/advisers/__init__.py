"""Who answers the questions of an engine, and how questions are asked."""
