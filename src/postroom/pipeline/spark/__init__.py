"""The Spark session, and the start of its JVM."""
