"""The session of Spark and its JVM. Knows no table."""
