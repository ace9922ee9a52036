//! What the controller says of this machine's services.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use coreward_model::ServiceAddress;
use coreward_wire::address::parse_address;
use coreward_wire::v1::StatusReply;

use super::is_address;
use crate::facts::{Role, Service};

/// Its answer.
#[derive(Default)]
pub(super) struct Fleet {
    /// Who answers, or why nobody does.
    pub answer: Option<Result<SocketAddr, String>>,
    pub services: Vec<Service>,
    pub servers: BTreeMap<String, Ipv4Addr>,
    pub reports_from_the_future: u64,
}

/// `name`: what the controller calls this machine; without it all services are its. Of several controllers one that
/// answers is enough.
pub(super) fn ask(role: Role, controllers: &[SocketAddr], name: Option<&str>) -> Fleet {
    let mut problems = Vec::new();
    for controller in controllers.iter().filter(|_| role != Role::Controller) {
        match coreward_control::show::fetch_status(*controller) {
            Err(error) => problems.push(format!("{error:#}")),
            Ok(reply) => return of(&reply, *controller, name.filter(|_| role == Role::Server)),
        }
    }
    Fleet { answer: (!problems.is_empty()).then(|| Err(problems.join("; "))), ..Fleet::default() }
}

fn of(reply: &StatusReply, controller: SocketAddr, server: Option<&str>) -> Fleet {
    let ours = reply
        .services
        .iter()
        .filter(|service| server.is_none_or(|name| service.servers.iter().any(|server| server == name)));
    let service = |service: &coreward_wire::v1::ServiceStatus| {
        let timestamps = service.mode.as_ref().map_or("", |mode| mode.timestamps.as_str());
        Some(Service {
            name: service.name.clone(),
            address: ServiceAddress::try_from(service.address.as_ref()?).ok()?,
            stamped_by_lb: timestamps == "lb",
            stamped: timestamps != "off",
            sockets: None,
        })
    };
    let address = |server: &coreward_wire::v1::ServerStatus| match parse_address("address", &server.address) {
        Ok(IpAddr::V4(address)) if is_address(address) => Some((server.name.clone(), address)),
        _ => None,
    };
    Fleet {
        answer: Some(Ok(controller)),
        services: ours.filter_map(service).collect(),
        servers: reply.servers.iter().filter(|server| server.state != "gone").filter_map(address).collect(),
        reports_from_the_future: reply.refused_reports.get("from_the_future").copied().unwrap_or(0),
    }
}
