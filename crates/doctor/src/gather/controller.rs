//! Services of this machine, from the controller.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::anyhow;
use coreward_control_server::config::ControllerConfig;
use coreward_http::client::{Client, Proof};
use coreward_http::tokens::token_file;
use coreward_model::ServiceAddress;
use coreward_rpc::v1::control_client::ControlClient;
use coreward_tls::connect::Connector;
use coreward_tls::verify::Host;
use coreward_tls::{Files, Role as CertifiedRole};
use coreward_wire::address::parse_address;
use coreward_wire::v1::{FleetReply, FleetRequest, FleetServer, FleetService};
use tonic::transport::Endpoint;

use crate::facts::{Role, Service};

const TIMEOUT: Duration = Duration::from_secs(5);
/// 16,384 servers and 1,000 services are about 1 MB.
const ANSWER_BYTES: usize = 64 << 20;

#[derive(Default)]
pub(super) struct Fleet {
    pub answer: Option<Result<SocketAddr, String>>,
    pub services: Vec<Service>,
    pub servers: BTreeMap<String, IpAddr>,
    pub reports_from_the_future: u64,
}

/// `name`: of this machine at the controller; without it all services are its. `tls`: the daemon's certificate. One
/// answer of several controllers suffices.
pub(super) fn query_controllers(
    role: Role,
    controllers: &[SocketAddr],
    tls: Option<&Files>,
    name: Option<&str>,
) -> Fleet {
    let mut problems = Vec::new();
    for controller in controllers.iter().filter(|_| role != Role::Controller) {
        match fetch(*controller, tls) {
            Err(error) => problems.push(format!("{error:#}")),
            Ok(reply) => return of(&reply, *controller, name.filter(|_| role == Role::Server)),
        }
    }
    Fleet { answer: (!problems.is_empty()).then(|| Err(problems.join("; "))), ..Fleet::default() }
}

/// Requests the answer by gRPC, as the daemon does.
fn fetch(controller: SocketAddr, tls: Option<&Files>) -> anyhow::Result<FleetReply> {
    let tls = coreward_tls::table::load(tls)?.map(|tls| (tls, &[CertifiedRole::Controller][..]));
    let unreachable = |reason: &dyn std::fmt::Display| {
        let expected = "expected a running `coreward controller` whose `listen` that is";
        anyhow!("no controller answers at {controller} ({reason}): {expected}")
    };
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
        let endpoint = Endpoint::from_shared(format!("http://{controller}"))?.connect_timeout(TIMEOUT).timeout(TIMEOUT);
        let channel = endpoint.connect_with_connector(Connector::new(controller, tls)).await;
        let channel = channel.map_err(|error| unreachable(&anyhow!(error).root_cause()))?;
        let mut client = ControlClient::new(channel).max_decoding_message_size(ANSWER_BYTES);
        let reply = client.fleet(FleetRequest {}).await;
        reply.map(tonic::Response::into_inner).map_err(|status| unreachable(&status.message()))
    })
}

/// Returns whether this file's controller runs, by its API on this host.
pub(super) fn is_running(config: &ControllerConfig) -> bool {
    let asked = || -> anyhow::Result<()> {
        // An API without its listening address is another controller's.
        drop(std::net::TcpStream::connect_timeout(&config.listen, TIMEOUT)?);
        let (scheme, ca) = match &config.tls {
            Some(files) if !config.api.ip().is_loopback() => ("https", Some(files.ca.clone())),
            _ => ("http", None),
        };
        let file = token_file(&config.token_directory, coreward_api::Role::Viewer);
        let url = format!("{scheme}://{}", config.api).parse()?;
        // On this host any of its addresses will do.
        let client = Client::with_controllers(vec![url], &Proof::Token { file, ca }, Host::Any)?;
        tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(client.health())?;
        Ok(())
    };
    asked().is_ok()
}

fn of(reply: &FleetReply, controller: SocketAddr, server: Option<&str>) -> Fleet {
    let ours = reply
        .services
        .iter()
        .filter(|service| server.is_none_or(|name| service.servers.iter().any(|server| server == name)));
    let service = |service: &FleetService| {
        Some(Service {
            name: service.name.clone(),
            address: ServiceAddress::try_from(service.address.as_ref()?).ok()?,
            stamped_by_lb: service.timestamps == "lb",
            stamped: service.timestamps != "off",
            forwarding: service.forwarding.parse().unwrap_or_default(),
            sockets: None,
        })
    };
    let address = |server: &FleetServer| match parse_address("address", &server.address) {
        Ok(address) if !address.is_unspecified() => Some((server.name.clone(), address)),
        _ => None,
    };
    Fleet {
        answer: Some(Ok(controller)),
        services: ours.filter_map(service).collect(),
        servers: reply.servers.iter().filter_map(address).collect(),
        reports_from_the_future: reply.reports_from_the_future,
    }
}
