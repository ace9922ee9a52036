//! `coreward status`, `explain`, `keys`, `apply` and `fleet`: asks a controller and puts its answer into words.

mod explain;
mod explain_pcap;
pub mod fleet;
mod json;
mod keys;
mod packets;
mod status;
#[cfg(test)]
mod tests;

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::anyhow;
use coreward_model::rss::RssKey;
use coreward_model::tuple::ServiceAddress;
use coreward_tls::Role;
use coreward_tls::connect::Connector;
use coreward_wire::address::{address_bytes, parse_address};
use coreward_wire::v1;
use coreward_wire::v1::control_client::ControlClient;
use tonic::transport::{Channel, Endpoint};

use crate::clock::wall_now;

pub use explain_pcap::explain_pcap;

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// 16,384 servers of 64 cores: about 10 MB.
const ANSWER_BYTES: usize = 256 << 20;

/// How an answer is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// For people.
    Text,
    /// One object, for programs.
    Json,
}

/// What a controller says of its fleet, without whole RSS keys.
///
/// # Errors
/// When it cannot be reached.
pub fn fetch_status(controller: impl Into<Contact>) -> anyhow::Result<v1::StatusReply> {
    ask(controller, async |client| client.status(v1::StatusRequest::default()).await)
}

/// What `coreward status` prints. `rss_keys`: as JSON, with whole RSS keys.
///
/// # Errors
/// When the controller cannot be reached.
pub fn status(controller: impl Into<Contact>, rss_keys: bool, format: Format) -> anyhow::Result<String> {
    let reply = ask(controller, async |client| client.status(v1::StatusRequest { rss_keys }).await)?;
    Ok(match format {
        Format::Text => status::text(&reply, wall_now()),
        Format::Json => json::pretty(&json::status(&reply)),
    })
}

/// What `coreward explain` prints.
///
/// # Errors
/// When the controller cannot be reached, or has no such service.
pub fn explain(
    controller: impl Into<Contact>,
    service: ServiceAddress,
    client: SocketAddr,
    established: Option<v1::EstablishedPacket>,
    format: Format,
) -> anyhow::Result<String> {
    let request = v1::ExplainRequest {
        service: Some(service.into()),
        client_address: address_bytes(client.ip()),
        client_port: client.port().into(),
        established,
    };
    let reply = ask(controller, async |stub| stub.explain(request).await)?;
    Ok(match format {
        Format::Text => explain::text(&reply, service, client),
        Format::Json => json::pretty(&json::explain(&reply)),
    })
}

/// What `coreward keys show` prints.
///
/// # Errors
/// When the controller cannot be reached.
pub fn keys(controller: impl Into<Contact>, format: Format) -> anyhow::Result<String> {
    let reply = fetch_status(controller)?;
    Ok(shown_keys(&reply.keys.unwrap_or_default(), format))
}

/// What `coreward keys rotate` prints: begins a rotation, or goes on with the one under way.
///
/// # Errors
/// When the controller cannot be reached, or a rotation is not safe now and not forced.
pub fn rotate_keys(controller: impl Into<Contact>, force: bool, format: Format) -> anyhow::Result<String> {
    let request = v1::RotateKeysRequest { force };
    let reply = ask(controller, async |client| client.rotate_keys(request).await)?;
    Ok(shown_keys(&reply, format))
}

fn shown_keys(keys: &v1::KeysStatus, format: Format) -> String {
    match format {
        Format::Text => keys::text(keys, wall_now()),
        Format::Json => json::pretty(&json::keys(keys)),
    }
}

/// Where a controller listens, and who asks it.
#[derive(Debug, Clone)]
pub struct Contact {
    /// Its `listen`.
    pub address: SocketAddr,
    /// The certificate of an operator or a viewer; `None`: the controller has no `[tls]`.
    pub tls: Option<coreward_tls::Files>,
}

impl From<SocketAddr> for Contact {
    fn from(address: SocketAddr) -> Self {
        Self { address, tls: None }
    }
}

/// One question to the controller.
fn ask<T>(
    contact: impl Into<Contact>,
    question: impl AsyncFnOnce(&mut ControlClient<Channel>) -> Result<tonic::Response<T>, tonic::Status>,
) -> anyhow::Result<T> {
    let Contact { address: controller, tls } = contact.into();
    let tls = coreward_tls::table::load(tls.as_ref())?.map(|tls| (tls, &[Role::Controller] as &[Role]));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let unreachable = |reason: &dyn std::fmt::Display| {
        let expected = "expected a running `coreward controller` whose `listen` that is";
        anyhow!("no controller answers at {controller} ({reason}): {expected}")
    };
    runtime.block_on(async {
        let endpoint =
            Endpoint::from_shared(format!("http://{controller}"))?.connect_timeout(PATIENCE).timeout(PATIENCE);
        let channel = endpoint.connect_with_connector(Connector::new(controller, tls)).await;
        let channel = channel.map_err(|error| unreachable(&anyhow!(error).root_cause()))?;
        let mut client = ControlClient::new(channel).max_decoding_message_size(ANSWER_BYTES);
        match question(&mut client).await {
            Ok(reply) => Ok(reply.into_inner()),
            Err(status) if is_an_answer(status.code()) => Err(anyhow!("{}", status.message())),
            Err(status) => Err(unreachable(&status.message())),
        }
    })
}

/// Whether the controller itself says so, and not the network.
fn is_an_answer(code: tonic::Code) -> bool {
    use tonic::Code::{Aborted, FailedPrecondition, Internal, InvalidArgument, NotFound, PermissionDenied};
    matches!(code, NotFound | InvalidArgument | FailedPrecondition | Internal | Aborted | PermissionDenied)
}

/// An address out of an answer.
fn shown_ip(bytes: &[u8]) -> String {
    parse_address("address", bytes).map_or_else(|_| "?".to_owned(), |address: IpAddr| address.to_string())
}

fn shown_service(address: Option<&v1::ServiceAddress>) -> String {
    let parsed = address.and_then(|address| ServiceAddress::try_from(address).ok());
    parsed.map_or_else(|| "?".to_owned(), |address| address.to_string())
}

/// A key out of an answer, as `ethtool -x` prints it; `None` when it is not known, or was not asked for.
fn shown_key(bytes: &[u8]) -> Option<String> {
    RssKey::new(bytes).ok().map(|key| key.to_string())
}
