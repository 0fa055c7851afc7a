"""The bare relays, ten lines each: the same libraries, nothing of up-streamer. `python -m bench.bare zenoh:7001
mqtt:7002`

They take no part in uProtocol beyond its bytes: no check, no log, no subscription, and what they hold is lost when they
end.
"""

from __future__ import annotations

import signal
import sys
import threading
import uuid
from collections.abc import Callable
from typing import Any, Final

from bench import networks, wire
from bench.load import answer

# paho looks through all that is in flight at each PUBACK; from 10 to 500 it made no difference
PAHO_WINDOW_MESSAGES: Final = 100

_ATTRIBUTES = wire.Attributes().attachment(0)
_ID_MSB, _ID_LSB = slice(4, 12), slice(13, 21)  # where the message id is in the attachment
Relay = Callable[[int, int], Any]


def zenoh_zenoh(source: int, destination: int) -> Any:
    incoming, outgoing = networks.zenoh_session(listen=source), networks.zenoh_session(listen=destination)
    put = networks.zenoh_publisher(outgoing).put
    subscriber = incoming.declare_subscriber(
        "up/**", lambda s: put(s.payload.to_bytes(), attachment=s.attachment.to_bytes())
    )
    return incoming, outgoing, subscriber


def zenoh_mqtt(source: int, destination: int) -> Any:
    client, properties_type = _paho(destination, "bare-out")
    incoming, window = networks.zenoh_session(listen=source), threading.Semaphore(PAHO_WINDOW_MESSAGES)
    client.on_publish = lambda *_: window.release()

    def on_sample(sample: Any) -> None:
        attributes, properties = sample.attachment.to_bytes(), properties_type(3)
        id = uuid.UUID(bytes=attributes[_ID_MSB][::-1] + attributes[_ID_LSB][::-1])
        properties.UserProperty = [
            ("uP", "1"),
            ("1", str(id)),
            ("2", "up-pub.v1"),
            ("3", "up://device1/10AB/3/80CD"),
            ("5", "CS1"),
        ]
        properties.ContentType = "2"
        window.acquire()
        client.publish(wire.MQTT_TOPIC, sample.payload.to_bytes(), qos=1, properties=properties)

    client.loop_start()
    return client, incoming, incoming.declare_subscriber("up/**", on_sample)


def mqtt_zenoh(source: int, destination: int) -> Any:
    outgoing, (client, _) = networks.zenoh_session(listen=destination), _paho(source, "bare-in")
    put = networks.zenoh_publisher(outgoing).put

    def on_message(_client: Any, _data: Any, message: Any) -> None:
        id = uuid.UUID(dict(message.properties.UserProperty)["1"]).bytes
        put(message.payload, attachment=_ATTRIBUTES[:4] + id[7::-1] + b"\x11" + id[:7:-1] + _ATTRIBUTES[21:])

    client.on_message = on_message
    client.subscribe(wire.MQTT_TOPIC, qos=1)
    client.loop_start()
    return outgoing, client


def dds_zenoh(source: int, destination: int) -> Any:
    from cyclonedds.core import InstanceState, ReadCondition, SampleState, ViewState, WaitSet

    participant, outgoing = networks.DdsParticipant(source), networks.zenoh_session(listen=destination)
    reader, put = participant.reader(wire.DDS_PARTITION), networks.zenoh_publisher(outgoing).put
    waitset = WaitSet(participant.participant)
    waitset.attach(ReadCondition(reader, ViewState.Any | SampleState.Any | InstanceState.Any))

    def relay() -> None:
        while True:
            waitset.wait(100_000_000)
            for sample in reader.take(networks.DDS_TAKE_SAMPLES):
                if sample.sample_info.valid_data:
                    attributes, payload = sample.parts
                    put(payload, attachment=b"\x01" + attributes)

    threading.Thread(target=relay, daemon=True).start()
    return participant, outgoing, waitset


def _paho(port: int, client_id: str) -> tuple[Any, Any]:
    from paho.mqtt import client as mqtt
    from paho.mqtt.enums import CallbackAPIVersion
    from paho.mqtt.properties import Properties

    client = mqtt.Client(CallbackAPIVersion.VERSION2, client_id=client_id, protocol=mqtt.MQTTv5)
    client.max_inflight_messages_set(PAHO_WINDOW_MESSAGES)
    client.connect("127.0.0.1", port)
    return client, Properties


RELAYS: Final[dict[tuple[str, str], Relay]] = {
    ("zenoh", "zenoh"): zenoh_zenoh,
    ("zenoh", "mqtt"): zenoh_mqtt,
    ("mqtt", "zenoh"): mqtt_zenoh,
    ("dds", "zenoh"): dds_zenoh,
}


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the bench ends us
    sys.setswitchinterval(0.001)
    source, destination = map(networks.Address.parse, sys.argv[1:3])
    _kept = RELAYS[source.network, destination.network](source.number, destination.number)
    answer(ready=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
