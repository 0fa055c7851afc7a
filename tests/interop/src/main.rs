//! up-rust as the other side of `test_interop.py`.
//!
//! ```text
//! stdin, one command a line -> Client -> up-rust -> up-transport-zenoh | up-transport-mqtt5
//! stdout <- {"id": .., "ok": ..} or {"id": .., "error": {"code": .., "message": ..}}   the answer to the command of that id
//! stdout <- {"ear": NAME, "umessage": HEX}                                              what a listener has received
//! stdout <- {"update": {"topic": .., "state": ..}}                                      what a subscription's handler was told
//! ```
//!
//! The first command is `open`. Messages cross the pipe as encoded `UMessage`s, so that the driver can compare every field of them.

use std::{collections::HashMap, error::Error, str::FromStr, sync::Arc};

use async_trait::async_trait;
use protobuf::{Enum, Message};
use serde::Deserialize;
use serde_json::{json, Value};
use tokio::io::{AsyncBufReadExt, BufReader};
use up_rust::{
    communication::{
        CallOptions, InMemoryRpcClient, InMemoryRpcServer, InMemorySubscriber,
        MockSubscriptionChangeHandler, Notifier, Publisher, RequestHandler, RpcClient,
        RpcClientUSubscription, RpcServer, ServiceInvocationError, SimpleNotifier, SimplePublisher,
        Subscriber, UPayload,
    },
    core::usubscription::{
        FetchSubscribersRequest, NotificationsRequest, SubscriptionRequest, SubscriptionStatus,
        USubscription, UnsubscribeRequest,
    },
    StaticUriProvider, UAttributes, UCode, UListener, UMessage, UMessageBuilder, UPayloadFormat,
    UPriority, UStatus, UTransport, UUri, UUID,
};
use up_transport_mqtt5::{Mqtt5Transport, Mqtt5TransportOptions, MqttClientOptions, TransportMode};
use up_transport_zenoh::{zenoh_config, UPTransportZenoh};

type Failure = Box<dyn Error + Send + Sync>;
type Answer = Result<Value, Failure>;

#[derive(Deserialize)]
struct Line {
    id: u64,
    #[serde(flatten)]
    command: Command,
}

#[derive(Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
enum Command {
    Open(Open),
    /// Register a listener; its messages are told under `name`.
    Listen {
        name: String,
        source: String,
        sink: Option<String>,
    },
    Unlisten {
        name: String,
    },
    /// Build a message with up-rust's builder, and send it. Answers with what was sent.
    Send(Fields),
    /// Send what the driver has built.
    SendEncoded {
        umessage: String,
    },
    /// `SimplePublisher`, without options.
    Publish {
        resource: u16,
        payload: String,
    },
    /// `SimpleNotifier`, without options.
    Notify {
        resource: u16,
        sink: String,
        payload: String,
    },
    /// `InMemoryRpcServer`: answers with the payload in upper case, or with the status `fails`.
    Serve {
        method: u16,
        fails: Option<i32>,
    },
    /// `InMemoryRpcClient`
    Call {
        method: String,
        ttl_ms: u32,
        token: Option<String>,
        payload: String,
    },
    /// `InMemorySubscriber`: messages are told under the topic's name, changes as updates.
    Subscribe {
        topic: String,
    },
    Unsubscribe {
        topic: String,
    },
    /// `RpcClientUSubscription`
    Usubscription {
        method: Method,
        topic: String,
    },
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Method {
    Subscribe,
    Unsubscribe,
    FetchSubscribers,
    RegisterForNotifications,
}

#[derive(Deserialize)]
struct Open {
    /// In the addresses of this uEntity; may be empty.
    authority: String,
    entity: u32,
    /// Of the transport, hence of keys and topics.
    host: String,
    #[serde(flatten)]
    transport: TransportOptions,
    /// Where uSubscription is called; without it as up-rust does, `up:/0/3/N`.
    usubscription: Option<String>,
}

#[derive(Deserialize)]
#[serde(tag = "transport", rename_all = "snake_case")]
enum TransportOptions {
    /// Settings of Zenoh by path, as JSON.
    Zenoh {
        settings: HashMap<String, Value>,
    },
    Mqtt5 {
        broker: String,
        off_vehicle: bool,
    },
}

#[derive(Deserialize)]
struct Fields {
    r#type: String,
    source: String,
    sink: Option<String>,
    ttl_ms: Option<u32>,
    priority: Option<i32>,
    token: Option<String>,
    permission_level: Option<u32>,
    traceparent: Option<String>,
    commstatus: Option<i32>,
    reqid: Option<String>,
    /// Hex.
    payload: Option<String>,
    #[serde(default)]
    payload_format: i32,
}

/// One line, whole: `println` holds the lock of stdout.
fn say(value: &Value) {
    println!("{value}");
}

fn uri(text: &str) -> Result<UUri, Failure> {
    Ok(UUri::from_str(text)?)
}

fn code<E: Enum>(number: i32) -> Result<E, Failure> {
    E::from_i32(number).ok_or_else(|| format!("up-rust has no {number} there").into())
}

fn text_payload(text: String) -> Option<UPayload> {
    Some(UPayload::new(text, UPayloadFormat::UPAYLOAD_FORMAT_TEXT))
}

fn encoded(message: &UMessage) -> Result<String, Failure> {
    Ok(hex::encode(message.write_to_bytes()?))
}

/// Tells what it receives.
struct Ear(String);

#[async_trait]
impl UListener for Ear {
    async fn on_receive(&self, message: UMessage) {
        let umessage = encoded(&message).expect("what has arrived can be encoded");
        say(&json!({"ear": self.0, "umessage": umessage}));
    }
}

/// Tells of changes. The trait of such handlers is not public in up-rust 0.9; its mock for tests is the one way to have one.
fn changes() -> MockSubscriptionChangeHandler {
    let mut handler = MockSubscriptionChangeHandler::new();
    handler
        .expect_on_subscription_change()
        .returning(|topic, status: SubscriptionStatus| {
            say(&json!({"update": {"topic": topic.to_uri(true), "state": status.state.value()}}));
        });
    handler
}

struct UpperCase {
    fails: Option<UCode>,
}

#[async_trait]
impl RequestHandler for UpperCase {
    async fn handle_request(
        &self,
        _resource_id: u16,
        _attributes: &UAttributes,
        payload: Option<UPayload>,
    ) -> Result<Option<UPayload>, ServiceInvocationError> {
        if let Some(code) = self.fails {
            return Err(UStatus::fail_with_code(code, "as it was told to").into());
        }
        Ok(payload.map(|given| {
            let format = given.payload_format();
            UPayload::new(given.payload().to_ascii_uppercase(), format)
        }))
    }
}

/// Calls methods at this authority: up-rust's own clients leave it out.
struct Addressed {
    authority: String,
    inner: Arc<dyn RpcClient>,
}

#[async_trait]
impl RpcClient for Addressed {
    async fn invoke_method(
        &self,
        mut method: UUri,
        options: CallOptions,
        payload: Option<UPayload>,
    ) -> Result<Option<UPayload>, ServiceInvocationError> {
        method.authority_name = self.authority.clone();
        self.inner.invoke_method(method, options, payload).await
    }
}

async fn open_transport(open: &Open) -> Result<Arc<dyn UTransport>, Failure> {
    match &open.transport {
        TransportOptions::Zenoh { settings } => {
            let mut config = zenoh_config::Config::default();
            for (path, value) in settings {
                config.insert_json5(path, &value.to_string())?;
            }
            let builder = UPTransportZenoh::builder(open.host.clone())?;
            Ok(Arc::new(builder.with_config(config).build().await?))
        }
        TransportOptions::Mqtt5 {
            broker,
            off_vehicle,
        } => {
            let mode = if *off_vehicle {
                TransportMode::OffVehicle
            } else {
                TransportMode::InVehicle
            };
            let options = Mqtt5TransportOptions {
                mode,
                mqtt_client_options: MqttClientOptions {
                    broker_uri: broker.clone(),
                    clean_start: true,
                    ..Default::default()
                },
                ..Default::default()
            };
            let transport = Mqtt5Transport::new(options, open.host.clone()).await?;
            transport.connect().await?;
            Ok(Arc::new(transport))
        }
    }
}

fn build(fields: Fields) -> Result<UMessage, Failure> {
    let source = uri(&fields.source)?;
    let sink = || uri(fields.sink.as_deref().ok_or("a sink is needed")?);
    let mut builder = match fields.r#type.as_str() {
        "publish" => UMessageBuilder::publish(source),
        "notification" => UMessageBuilder::notification(source, sink()?),
        "request" => {
            UMessageBuilder::request(sink()?, source, fields.ttl_ms.ok_or("a ttl is needed")?)
        }
        "response" => {
            let reqid = UUID::from_str(fields.reqid.as_deref().ok_or("a reqid is needed")?)?;
            UMessageBuilder::response(sink()?, reqid, source)
        }
        other => return Err(format!("no such type: {other}").into()),
    };
    if let Some(ttl_ms) = fields.ttl_ms {
        builder.with_ttl(ttl_ms);
    }
    if let Some(priority) = fields.priority {
        builder.with_priority(code::<UPriority>(priority)?);
    }
    if let Some(token) = fields.token {
        builder.with_token(token);
    }
    if let Some(level) = fields.permission_level {
        builder.with_permission_level(level);
    }
    if let Some(traceparent) = fields.traceparent {
        builder.with_traceparent(traceparent);
    }
    if let Some(status) = fields.commstatus {
        builder.with_comm_status(code(status)?);
    }
    Ok(match fields.payload {
        Some(payload) => {
            builder.build_with_payload(hex::decode(payload)?, code(fields.payload_format)?)?
        }
        None => builder.build()?,
    })
}

/// One uEntity: its transport, and what up-rust's communication layer has for it.
struct Client {
    transport: Arc<dyn UTransport>,
    local: Arc<StaticUriProvider>,
    rpc: Arc<dyn RpcClient>,
    server: InMemoryRpcServer,
    usubscription: Arc<RpcClientUSubscription>,
    subscriber: InMemorySubscriber,
    ears: HashMap<String, (UUri, Option<UUri>, Arc<Ear>)>,
}

impl Client {
    async fn open(open: Open) -> Result<Self, Failure> {
        let transport = open_transport(&open).await?;
        let local = Arc::new(StaticUriProvider::new(open.authority, open.entity, 1));
        let rpc: Arc<dyn RpcClient> =
            Arc::new(InMemoryRpcClient::new(transport.clone(), local.clone()).await?);
        let to_service = match open.usubscription {
            Some(authority) => Arc::new(Addressed {
                authority,
                inner: rpc.clone(),
            }),
            None => rpc.clone(),
        };
        let usubscription = Arc::new(RpcClientUSubscription::new(to_service));
        let notifier = Arc::new(SimpleNotifier::new(transport.clone(), local.clone()));
        let subscriber = InMemorySubscriber::for_clients(
            transport.clone(),
            local.clone(),
            usubscription.clone(),
            notifier,
        );
        Ok(Self {
            server: InMemoryRpcServer::new(transport.clone(), local.clone()),
            subscriber: subscriber.await?,
            ears: HashMap::new(),
            transport,
            local,
            rpc,
            usubscription,
        })
    }

    async fn execute(&mut self, command: Command) -> Answer {
        match command {
            Command::Open(_) => Err("it is open".into()),
            Command::Listen { name, source, sink } => self.listen(name, source, sink).await,
            Command::Unlisten { name } => self.unlisten(&name).await,
            Command::Send(fields) => self.send(build(fields)?).await,
            Command::SendEncoded { umessage } => {
                self.send(UMessage::parse_from_bytes(&hex::decode(umessage)?)?)
                    .await
            }
            Command::Publish { resource, payload } => {
                let publisher = SimplePublisher::new(self.transport.clone(), self.local.clone());
                let options = CallOptions::for_publish(None, None, None);
                publisher
                    .publish(resource, options, text_payload(payload))
                    .await?;
                Ok(Value::Null)
            }
            Command::Notify {
                resource,
                sink,
                payload,
            } => {
                let notifier = SimpleNotifier::new(self.transport.clone(), self.local.clone());
                let options = CallOptions::for_notification(None, None, None);
                notifier
                    .notify(resource, &uri(&sink)?, options, text_payload(payload))
                    .await?;
                Ok(Value::Null)
            }
            Command::Serve { method, fails } => self.serve(method, fails).await,
            Command::Call {
                method,
                ttl_ms,
                token,
                payload,
            } => {
                let options = CallOptions::for_rpc_request(ttl_ms, None, token, None);
                let answer = self
                    .rpc
                    .invoke_method(uri(&method)?, options, text_payload(payload))
                    .await
                    .map_err(UStatus::from)?;
                Ok(answer.map_or(Value::Null, |given| {
                    String::from_utf8_lossy(&given.payload()).into()
                }))
            }
            Command::Subscribe { topic } => self.subscribe(topic).await,
            Command::Unsubscribe { topic } => self.unsubscribe(topic).await,
            Command::Usubscription { method, topic } => self.ask(method, uri(&topic)?).await,
        }
    }

    async fn listen(&mut self, name: String, source: String, sink: Option<String>) -> Answer {
        let source = uri(&source)?;
        let sink = sink.as_deref().map(uri).transpose()?;
        let ear = Arc::new(Ear(name.clone()));
        self.transport
            .register_listener(&source, sink.as_ref(), ear.clone())
            .await?;
        self.ears.insert(name, (source, sink, ear));
        Ok(Value::Null)
    }

    async fn unlisten(&mut self, name: &str) -> Answer {
        let (source, sink, ear) = self.ears.remove(name).ok_or("nobody listens there")?;
        self.transport
            .unregister_listener(&source, sink.as_ref(), ear)
            .await?;
        Ok(Value::Null)
    }

    async fn send(&self, message: UMessage) -> Answer {
        let umessage = encoded(&message)?;
        self.transport.send(message).await?;
        Ok(umessage.into())
    }

    async fn serve(&self, method: u16, fails: Option<i32>) -> Answer {
        let fails = fails.map(code).transpose()?;
        self.server
            .register_endpoint(None, method, Arc::new(UpperCase { fails }))
            .await?;
        Ok(Value::Null)
    }

    async fn subscribe(&mut self, topic: String) -> Answer {
        let source = uri(&topic)?;
        let ear = Arc::new(Ear(topic.clone()));
        self.ears.insert(topic, (source.clone(), None, ear.clone()));
        self.subscriber
            .subscribe(&source, ear, Some(Arc::new(changes())))
            .await?;
        Ok(Value::Null)
    }

    async fn unsubscribe(&mut self, topic: String) -> Answer {
        let (source, _, ear) = self.ears.get(&topic).ok_or("nobody subscribed")?;
        self.subscriber.unsubscribe(source, ear.clone()).await?;
        Ok(Value::Null)
    }

    async fn ask(&self, method: Method, topic: UUri) -> Answer {
        let topic = Some(topic).into();
        Ok(match method {
            Method::Subscribe => {
                let request = SubscriptionRequest {
                    topic,
                    ..Default::default()
                };
                let answer = self.usubscription.subscribe(request).await?;
                json!({"topic": answer.topic.to_uri(true), "state": answer.status.state.value()})
            }
            Method::Unsubscribe => {
                let request = UnsubscribeRequest {
                    topic,
                    ..Default::default()
                };
                self.usubscription.unsubscribe(request).await?.into()
            }
            Method::FetchSubscribers => {
                let request = FetchSubscribersRequest {
                    topic,
                    ..Default::default()
                };
                let answer = self.usubscription.fetch_subscribers(request).await?;
                let uris = answer.subscribers.iter().map(|one| one.uri.to_uri(true));
                uris.collect::<Vec<_>>().into()
            }
            Method::RegisterForNotifications => {
                let request = NotificationsRequest {
                    topic,
                    ..Default::default()
                };
                self.usubscription
                    .register_for_notifications(request)
                    .await?
                    .into()
            }
        })
    }
}

/// A `UStatus` keeps its code; what else up-rust raises has none.
fn error(failure: &Failure) -> Value {
    let code = failure
        .downcast_ref::<UStatus>()
        .map(|status| status.get_code().value());
    json!({"code": code, "message": failure.to_string()})
}

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let mut lines = BufReader::new(tokio::io::stdin()).lines();
    let mut client: Option<Client> = None;
    while let Some(text) = lines.next_line().await? {
        let Line { id, command } = serde_json::from_str(&text)?;
        let answer = match (client.as_mut(), command) {
            (None, Command::Open(open)) => Client::open(open).await.map(|opened| {
                client = Some(opened);
                Value::Null
            }),
            (None, _) => Err("open comes first".into()),
            (Some(opened), command) => opened.execute(command).await,
        };
        say(&match answer {
            Ok(value) => json!({"id": id, "ok": value}),
            Err(failure) => json!({"id": id, "error": error(&failure)}),
        });
    }
    Ok(())
}
