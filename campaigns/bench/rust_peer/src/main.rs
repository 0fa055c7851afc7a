//! `rust-peer zenoh:PORT mqtt:PORT INTEREST.json`: Eclipse's Rust streamer as a lane of the bench.
//!
//! device1 at the first address -> up-streamer -> device2 at the second. Its own configurable-streamer has one connection
//! for each kind of network, so it can't join two Zenoh networks or two brokers.
//! Prints "ready" on stdout, and ends when stdin closes.

use std::error::Error;
use std::sync::Arc;

use tokio::io::{stdin, AsyncReadExt};
use up_rust::core::usubscription::USubscription;
use up_rust::UTransport;
use up_streamer::{Endpoint, UStreamer};
use up_transport_mqtt5::{Mqtt5Transport, Mqtt5TransportOptions, MqttClientOptions};
use up_transport_zenoh::{zenoh_config, UPTransportZenoh};
use usubscription_static_file::USubscriptionStaticFile;

type Failure = Box<dyn Error + Send + Sync>;

const SOURCE: &str = "device1";
const DESTINATION: &str = "device2";
const STREAMER: &str = "streamer"; // each transport needs its own authority
const QUEUE_MESSAGES: u16 = 10_000; // of each route, as in its example configuration; beyond it messages are lost

async fn transport(address: &str, name: &str) -> Result<Arc<dyn UTransport>, Failure> {
    match address.split_once(':') {
        Some(("zenoh", port)) => {
            let mut config = zenoh_config::Config::default();
            let listen = format!(r#"["tcp/127.0.0.1:{port}"]"#);
            config.insert_json5("listen/endpoints", &listen)?;
            config.insert_json5("scouting/multicast/enabled", "false")?;
            let builder = UPTransportZenoh::builder(STREAMER)?;
            Ok(Arc::new(builder.with_config(config).build().await?))
        }
        Some(("mqtt", port)) => {
            let options = Mqtt5TransportOptions {
                mqtt_client_options: MqttClientOptions {
                    broker_uri: format!("127.0.0.1:{port}"),
                    client_id: Some(name.to_string()),
                    ..Default::default()
                },
                ..Default::default()
            };
            let made = Mqtt5Transport::new(options, STREAMER).await?;
            made.connect().await?;
            Ok(Arc::new(made))
        }
        _ => Err(format!("expected zenoh:PORT or mqtt:PORT, got {address}").into()),
    }
}

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let [source, destination, interest]: [String; 3] = std::env::args()
        .skip(1)
        .collect::<Vec<_>>()
        .try_into()
        .map_err(|_| "expected SOURCE DESTINATION INTEREST.json")?;
    let usubscription: Arc<dyn USubscription> = Arc::new(USubscriptionStaticFile::new(interest));
    let mut streamer = UStreamer::new("bench", QUEUE_MESSAGES, usubscription).await?;
    let from = Endpoint::new("in", SOURCE, transport(&source, "rust-in").await?);
    let to = Endpoint::new("out", DESTINATION, transport(&destination, "rust-out").await?);
    streamer.add_route_ref(&from, &to).await?;
    println!("ready");
    let mut rest = Vec::new();
    stdin().read_to_end(&mut rest).await?;
    Ok(())
}
