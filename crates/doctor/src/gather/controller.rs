//! Facts about services and servers, which a controller provides.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::anyhow;
use coreward_control_server::config::ControllerConfig;
use coreward_http::client::{ApiCredential, ControllerClient};
use coreward_http::tokens::token_file_path;
use coreward_model::ServiceAddress;
use coreward_model::forwarding::ForwardingMode;
use coreward_rpc::v1::control_client::ControlClient;
use coreward_tls::connect::GrpcConnector;
use coreward_tls::verify::ExpectedControllerHost;
use coreward_tls::{FleetRole as CertifiedRole, TlsCredentialFiles};
use coreward_wire::address::parse_address;
use coreward_wire::v1::{FleetReply, FleetRequest, FleetServer, FleetService};
use tonic::transport::Endpoint;

use crate::facts::{MachineRole, ServerFacts, ServiceFacts};

const CONTROLLER_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum size of the controller's reply, in bytes. 16,384 servers and 1,000 services take about 1 MB.
const MAX_CONTROLLER_REPLY_BYTES: usize = 64 << 20;

#[derive(Default)]
pub(super) struct FleetFacts {
    pub answering_controller: Option<Result<SocketAddr, String>>,
    pub services: Vec<ServiceFacts>,
    pub servers_by_name: BTreeMap<String, ServerFacts>,
    pub future_dated_report_count: u64,
}

/// Queries the controllers in order, and returns the facts in the first answer. For a server with a `name`, the facts
/// include only the services that have this server. `tls` contains the daemon's certificate.
pub(super) fn query_controllers(
    role: MachineRole,
    controllers: &[SocketAddr],
    tls: Option<&TlsCredentialFiles>,
    name: Option<&str>,
) -> FleetFacts {
    let mut problems = Vec::new();
    for controller in controllers.iter().filter(|_| role != MachineRole::Controller) {
        match fetch_fleet(*controller, tls) {
            Err(error) => problems.push(format!("{error:#}")),
            Ok(reply) => return to_fleet_facts(&reply, *controller, name.filter(|_| role == MachineRole::Server)),
        }
    }
    FleetFacts {
        answering_controller: (!problems.is_empty()).then(|| Err(problems.join("; "))),
        ..FleetFacts::default()
    }
}

/// Requests the services and servers of the fleet from a controller by gRPC, as a daemon does.
fn fetch_fleet(controller: SocketAddr, tls: Option<&TlsCredentialFiles>) -> anyhow::Result<FleetReply> {
    let tls_config = coreward_tls::table::load_tls_credentials(tls)?.map(|tls| (tls, &[CertifiedRole::Controller][..]));
    let unreachable_error = |reason: &dyn std::fmt::Display| {
        let expected = "expected a running `coreward controller` whose `listen` that is";
        anyhow!("no controller answers at {controller} ({reason}): {expected}")
    };
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
        let endpoint = Endpoint::from_shared(format!("http://{controller}"))?
            .connect_timeout(CONTROLLER_TIMEOUT)
            .timeout(CONTROLLER_TIMEOUT);
        let channel = endpoint.connect_with_connector(GrpcConnector::new(controller, tls_config)).await;
        let channel = channel.map_err(|error| unreachable_error(&anyhow!(error).root_cause()))?;
        let mut client = ControlClient::new(channel).max_decoding_message_size(MAX_CONTROLLER_REPLY_BYTES);
        let fleet_reply = client.fleet(FleetRequest {}).await;
        fleet_reply.map(tonic::Response::into_inner).map_err(|status| unreachable_error(&status.message()))
    })
}

/// Returns whether a controller with this configuration is running on this host and answers at its HTTP API.
pub(super) fn is_controller_running(config: &ControllerConfig) -> bool {
    let request_controller_status = || -> anyhow::Result<()> {
        // If no process answers at the listening address, another controller owns the API's address.
        drop(std::net::TcpStream::connect_timeout(&config.listen_address, CONTROLLER_TIMEOUT)?);
        let (scheme, ca) = match &config.credential_files {
            Some(files) if !config.api_listen_address.ip().is_loopback() => ("https", Some(files.ca_path.clone())),
            _ => ("http", None),
        };
        let file = token_file_path(&config.token_directory, coreward_api::Role::Viewer);
        let api_url = format!("{scheme}://{}", config.api_listen_address).parse()?;
        // Any name in the certificate is accepted, because the controller is on this host.
        let client = ControllerClient::with_controllers(
            vec![api_url],
            &ApiCredential::Token { file, ca },
            ExpectedControllerHost::Any,
        )?;
        tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(client.health())?;
        Ok(())
    };
    request_controller_status().is_ok()
}

fn to_fleet_facts(reply: &FleetReply, controller: SocketAddr, server_name: Option<&str>) -> FleetFacts {
    let own_services = reply
        .services
        .iter()
        .filter(|service| server_name.is_none_or(|name| service.servers.iter().any(|server| server == name)));
    let to_service_facts = |service: &FleetService| {
        Some(ServiceFacts {
            name: service.name.clone(),
            address: ServiceAddress::try_from(service.address.as_ref()?).ok()?,
            is_stamped_by_lb: service.timestamps == "lb",
            is_stamped: service.timestamps != "off",
            forwarding: service.forwarding.parse().unwrap_or_default(),
            sockets: None,
        })
    };
    let segment_server_names: BTreeSet<&String> = own_services
        .clone()
        .filter(|service| !service.forwarding.parse::<ForwardingMode>().unwrap_or_default().encapsulates())
        .flat_map(|service| &service.servers)
        .collect();
    let to_server_facts = |server: &FleetServer| {
        let server_address =
            parse_address("address", &server.address).ok().filter(|address| !address.is_unspecified())?;
        let is_on_segment = segment_server_names.contains(&server.name) && server.vlan == 0;
        Some((server.name.clone(), ServerFacts { address: server_address, is_on_segment }))
    };
    FleetFacts {
        answering_controller: Some(Ok(controller)),
        services: own_services.filter_map(to_service_facts).collect(),
        servers_by_name: reply.servers.iter().filter_map(to_server_facts).collect(),
        future_dated_report_count: reply.reports_ahead,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_behind_routers_or_in_vlans_are_not_on_the_segment() {
        let new_service = |forwarding: &str, servers: &[&str]| FleetService {
            forwarding: forwarding.to_owned(),
            servers: servers.iter().map(|name| (*name).to_owned()).collect(),
            ..FleetService::default()
        };
        let new_server = |name: &str, vlan| FleetServer { name: name.to_owned(), address: vec![10, 1, 1, 2], vlan };
        let fleet_reply = FleetReply {
            services: vec![new_service("gue", &["routed", "both"]), new_service("", &["both", "near", "tagged"])],
            servers: vec![
                new_server("routed", 0),
                new_server("both", 0),
                new_server("near", 0),
                new_server("tagged", 7),
            ],
            ..FleetReply::default()
        };
        let fleet_facts = to_fleet_facts(&fleet_reply, "10.1.0.2:7400".parse().unwrap(), None);
        let segment_servers = fleet_facts.servers_by_name.iter().filter(|(_, server)| server.is_on_segment);
        assert_eq!(segment_servers.map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["both", "near"]);
        assert_eq!(fleet_facts.servers_by_name.len(), 4);
    }
}
