"""MQTT 5: uProtocol over a broker, in-vehicle and off-vehicle."""
