//! Facts about the sockets on this machine that receive a service's connections or datagrams.

use std::collections::BTreeMap;
use std::os::fd::AsFd as _;

use coreward_dataplane::listeners::{self, ServiceSocket};
use coreward_model::ServiceAddress;
use coreward_model::tuple::TransportProtocol;
use nix::sys::socket::{getsockopt, sockopt};

use crate::facts::ServiceSocketFacts;

pub(super) fn gather_sockets(service: &ServiceAddress) -> Result<ServiceSocketFacts, String> {
    try_gather_sockets(service).map_err(|error| format!("{error:#}"))
}

fn try_gather_sockets(service: &ServiceAddress) -> anyhow::Result<ServiceSocketFacts> {
    let socket_inodes = match service.protocol {
        TransportProtocol::Tcp => listeners::tcp_listener_inodes(service.vip_and_port)?,
        TransportProtocol::Udp => listeners::udp_socket_inodes(service.vip_and_port)?,
    };
    // As in the agent, a socket's workers are the processes that wait for it by epoll, or else those that have it open.
    let mut listeners_by_inode: BTreeMap<u64, ServiceSocket> =
        listeners::find_processes_waiting_with_epoll(&socket_inodes)?
            .into_iter()
            .map(|listener| (listener.inode, listener))
            .collect();
    let socket_inodes_without_waiter =
        socket_inodes.iter().copied().filter(|inode| !listeners_by_inode.contains_key(inode)).collect();
    listeners_by_inode.extend(
        listeners::find_owning_processes(&socket_inodes_without_waiter)?
            .into_iter()
            .map(|listener| (listener.inode, listener)),
    );
    let has_reuseport = listeners_by_inode.values().find_map(|listener| {
        let socket = listeners::duplicate_process_socket(listener).ok()?;
        getsockopt(&socket.as_fd(), sockopt::ReusePort).ok()
    });
    let worker_cpus = listeners_by_inode.into_values().map(|listener| listener.cpu_affinity).collect();
    Ok(ServiceSocketFacts { socket_count: socket_inodes.len(), has_reuseport, worker_cpu_affinities: worker_cpus })
}
