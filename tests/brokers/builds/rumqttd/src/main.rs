//! rumqttd with the configuration FILE: rumqttd-of-tests FILE

fn main() {
    tracing_subscriber::fmt().with_max_level(tracing_subscriber::filter::LevelFilter::WARN).init();
    let path = std::env::args().nth(1).expect("the path of a configuration file");
    let read = config::Config::builder().add_source(config::File::with_name(&path)).build().unwrap();
    rumqttd::Broker::new(read.try_deserialize().unwrap()).start().unwrap();
}
