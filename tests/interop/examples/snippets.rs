//! The snippets of docs/interop.md: `make interop` builds them, and checks that the page has them as they are here.

use std::{error::Error, sync::Arc};

use up_rust::{
    communication::{InMemorySubscriber, Publisher, SimplePublisher},
    StaticUriProvider, UTransport,
};
use up_transport_mqtt5::{Mqtt5Transport, Mqtt5TransportOptions, MqttClientOptions, TransportMode};
use up_transport_zenoh::{zenoh_config, UPTransportZenoh};

type Opened = Result<Arc<dyn UTransport>, Box<dyn Error + Send + Sync>>;

async fn zenoh() -> Opened {
    let mut config = zenoh_config::Config::default();
    config.insert_json5("mode", r#""client""#)?;
    config.insert_json5("connect/endpoints", r#"["tcp/127.0.0.1:7447"]"#)?;
    config.insert_json5("scouting/multicast/enabled", "false")?;
    let builder = UPTransportZenoh::builder("vehicle1")?;
    Ok(Arc::new(builder.with_config(config).build().await?))
}

async fn mqtt5(mode: TransportMode) -> Opened {
    let options = Mqtt5TransportOptions {
        mode, // TransportMode::InVehicle or TransportMode::OffVehicle, as at the gateway's endpoint
        mqtt_client_options: MqttClientOptions {
            broker_uri: "mqtt://127.0.0.1:1883".to_string(),
            ..Default::default()
        },
        ..Default::default()
    };
    let transport = Mqtt5Transport::new(options, "ecu1").await?;
    transport.connect().await?;
    Ok(Arc::new(transport))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let transport = match std::env::args().nth(1).as_deref() {
        Some("zenoh") => zenoh().await?,
        Some("off-vehicle") => mqtt5(TransportMode::OffVehicle).await?,
        _ => mqtt5(TransportMode::InVehicle).await?,
    };
    let local = Arc::new(StaticUriProvider::new("ecu1", 0xA001, 1));
    let _subscriber = InMemorySubscriber::new(transport.clone(), local.clone()).await?;
    let options = up_rust::communication::CallOptions::for_publish(None, None, None);
    SimplePublisher::new(transport, local)
        .publish(0x8001, options, None)
        .await?;
    Ok(())
}
