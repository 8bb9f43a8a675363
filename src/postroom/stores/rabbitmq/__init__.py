"""A store whose lanes are in RabbitMQ."""
