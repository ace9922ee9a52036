//! Access to an earlier process's pinned state, for read-only commands.

use std::path::Path;

use coreward_intf as intf;
use coreward_model::{ServerId, ServiceAddress};

use super::link::XdpLink;
use super::program::LoadBalancerMaps;
use super::servers::{resolved_mac_of_entry, server_entry};
use super::services::read_services;
use super::{SERVER_FLAGS_SHIFT, Server, ServiceIndex};

/// Returns the reason why [`LoadBalancer::load`](super::LoadBalancer::load) cannot take over the state pinned below
/// `pin_directory`. Returns `None` if it can, or if nothing is pinned.
pub fn find_takeover_problem(pin_directory: &Path) -> Option<String> {
    let lb_directory = pin_directory.join("lb");
    if !lb_directory.join("link").exists() {
        return None;
    }
    LoadBalancerMaps::take_over(&lb_directory).err().map(|error| format!("{error:#}"))
}

/// Returns the id of the attached program of the load balancer that is pinned below `pin_directory`. Returns `None` if
/// no link is pinned. Fails when the link cannot be read.
pub fn pinned_program_id(pin_directory: &Path) -> anyhow::Result<Option<u32>> {
    XdpLink::open_pinned(&pin_directory.join("lb").join("link"))?.map(|link| link.program_id()).transpose()
}

/// Read access to a running load balancer's servers without its daemon.
#[derive(Debug)]
pub struct PinnedServers {
    maps: LoadBalancerMaps,
}

impl PinnedServers {
    /// Opens the maps pinned in `pin_directory`. Fails when it has no pinned load balancer, or one of another version.
    pub fn open(pin_directory: &Path) -> anyhow::Result<Self> {
        Ok(Self { maps: LoadBalancerMaps::take_over(&super::pin_directory::find_lb_directory(pin_directory)?)? })
    }

    /// Returns the index of the service with this address, or `None` if there is no such service.
    pub fn service_index(&self, address: &ServiceAddress) -> Option<ServiceIndex> {
        read_services(&self.maps).get(address).map(|service| service.index)
    }

    /// Returns the current state of a service's server, or `None` if the service has no such server.
    pub fn server(&self, service: ServiceIndex, id: ServerId) -> Option<Server> {
        let entry_word = server_entry(&self.maps, service, id);
        let server_flags = (entry_word >> SERVER_FLAGS_SHIFT) as u32;
        let server =
            Server { mac: resolved_mac_of_entry(entry_word), is_eligible: server_flags & intf::SERVER_ELIGIBLE != 0 };
        (server_flags & intf::SERVER_KNOWN != 0).then_some(server)
    }
}
