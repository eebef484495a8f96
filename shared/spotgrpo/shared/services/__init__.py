"""Private RabbitMQ and S3 servers, as children of this process: for the demo, the tests and `spotgrpo services`.

They listen on the loopback interface only, keep everything under one folder, and end with the process that
started them, however it ends.
"""

from spotgrpo.shared.services.rabbitmq import PrivateRabbitMQ
from spotgrpo.shared.services.seaweedfs import PrivateS3

__all__ = ["PrivateRabbitMQ", "PrivateS3"]
