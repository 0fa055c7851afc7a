"""Where Spark looks: it imports every top-level module whose name begins with pyspark_ and takes its DefaultSource."""

from spark_ingest.source import UProtocolDataSource as DefaultSource

__all__ = ["DefaultSource"]
