"""The history of a streamer as a Spark data source, and the job that writes it to Parquet.

source     the format `uprotocol`: what Spark calls, on the driver and in tasks
client     a streamer's history for callers without an event loop; the options of the source
offsets    how far each log was read, and what the next batch is (pure)
decode     records to rows: UMessages in, Arrow batches out (pure)
pipeline   the job: configuration, session, query       __main__  python -m spark_ingest
parquet    reads back what the job wrote                plot      a picture of it
java       a Java for Spark
"""
