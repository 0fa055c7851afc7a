"""A Spark data source of the history of a streamer, and the job that writes it to Parquet.

source     the format `uprotocol`: the classes that Spark calls, on the driver and in tasks
client     access to a streamer's history without an event loop; the options of the source
offsets    positions in logs, and the plan of the next batch (pure)
epochs     which records wait for the end of their epoch (pure)
decode     records to rows: UMessages in, Arrow batches out (pure)
payloads   payloads to values: Sample, wrappers, text, JSON (pure)
pipeline   the job: configuration, session, query       __main__  python -m spark_ingest
parquet    reads the job's Parquet                      plot      draws it
java       finds a Java for Spark
"""
