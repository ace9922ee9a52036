//! Names of daemons and addresses of controllers.

use std::net::SocketAddr;

use anyhow::Context as _;

use crate::addresses::{AddressFamily, CONTROLLER_ADDRESS, rack_controller_address};

pub const CONTROLLER_PORT: u16 = 7400;
/// Port of the first controller's HTTP API, which only its own host can reach. The other controllers use consecutive
/// ports.
const FIRST_API_PORT: u16 = 7401;

pub fn first_controller_address() -> String {
    controller_address(1)
}

/// Returns the IPv4 address and port of controller `number`, counted from 1.
pub fn controller_address(number: u16) -> String {
    controller_address_in_family(AddressFamily::Ipv4, number)
}

/// Returns the address and port of controller `number` in the given address family.
pub fn controller_address_in_family(family: AddressFamily, number: u16) -> String {
    SocketAddr::new(family.host_address(CONTROLLER_ADDRESS), CONTROLLER_PORT + number - 1).to_string()
}

/// Returns the address and port of rack controller `number`, counted from 1.
pub fn rack_controller_listen_address(number: u16) -> String {
    format!("{}:{CONTROLLER_PORT}", rack_controller_address(number))
}

/// Returns the address and port of controller `number`'s HTTP API, for clients on the controller's host.
pub fn controller_api_address(number: u16) -> String {
    format!("127.0.0.1:{}", FIRST_API_PORT + number - 1)
}

/// Returns the name of controller `number`. The first is named `controller`, and the names of others include their
/// number.
pub fn controller_name(number: u16) -> String {
    if number == 1 { FIRST_CONTROLLER_NAME.to_owned() } else { format!("{FIRST_CONTROLLER_NAME}{number}") }
}

const AGENT_NAME_PREFIX: &str = "agent-s";
pub const FIRST_CONTROLLER_NAME: &str = "controller";

/// Returns the name of the agent daemon of server `number`.
pub fn agent_name(number: u16) -> String {
    format!("{AGENT_NAME_PREFIX}{number}")
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DaemonName {
    Controller(u16),
    RackController(u16),
    LoadBalancer(u16),
    Agent(u16),
}

impl DaemonName {
    pub(super) fn parse(name: &str) -> anyhow::Result<Self> {
        let parse_number_after = |prefix: &str| name.strip_prefix(prefix).and_then(|number| number.parse().ok());
        match name {
            FIRST_CONTROLLER_NAME => Some(Self::Controller(1)),
            _ => parse_number_after(FIRST_CONTROLLER_NAME)
                .map(Self::Controller)
                .or_else(|| parse_number_after("rack").map(Self::RackController))
                .or_else(|| parse_number_after("lb").map(Self::LoadBalancer))
                .or_else(|| parse_number_after(AGENT_NAME_PREFIX).map(Self::Agent)),
        }
        .with_context(|| format!("no daemon {name:?}: expected controller, rackN, lbN or agent-sN"))
    }
}
