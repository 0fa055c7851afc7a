"""A Spark data source of the history of a streamer, and the job that writes it to Parquet.

source     the format `uprotocol`: the classes that Spark calls, on the driver and in tasks
options    the options of the source
client     a session: the histories of a network without an event loop; reads ranges
planner    the next micro-batch      fleet   the histories of a query      members   what is known of one of them
polls      one poll waits at each history, with the plan of its next records
offsets    positions in logs, and ranges and partitions between two of them (pure)
epochs     which records wait for the end of their epoch (pure)
decode     records to rows: UMessages in, Arrow batches out (pure)
payloads   payloads to values: Sample, wrappers, text, JSON (pure)
pipeline   the job: configuration, session, query       __main__  python -m spark_ingest
parquet    reads the job's Parquet                      plot      draws it
java       finds a Java for Spark
"""
