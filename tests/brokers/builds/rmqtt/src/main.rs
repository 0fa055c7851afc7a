//! rmqtt on 127.0.0.1, in memory: rmqtt-of-tests PORT [QUEUED_MAX PACKET_BYTES_MAX], which are its own unless given

use rmqtt::context::ServerContext;
use rmqtt::net::{Builder, Result};
use rmqtt::server::MqttServer;

#[tokio::main]
async fn main() -> Result<()> {
    let numbers: Vec<u32> = std::env::args().skip(1).map(|one| one.parse().expect("a number")).collect();
    let mut listener = Builder::new()
        .name("tcp")
        .laddr(([127, 0, 0, 1], numbers[0] as u16).into())
        .reuseaddr(Some(true))
        .allow_anonymous(true);
    if let [_, queued_max, packet_bytes_max] = numbers[..] {
        listener = listener.max_mqueue_len(queued_max as usize).max_packet_size(packet_bytes_max);
    }
    MqttServer::new(ServerContext::new().build().await).listener(listener.bind()?.tcp()?).build().run().await
}
