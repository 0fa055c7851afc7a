"""uProtocol over NATS JetStream: a transport plugin for up-streamer. `transport` is the plugin, `mapping` the format on
the wire."""
