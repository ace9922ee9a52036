//! Sockets that receive a service's connections or datagrams on this machine.

use std::collections::BTreeMap;
use std::os::fd::AsFd as _;

use coreward_dataplane::listeners::{self, Listener};
use coreward_model::ServiceAddress;
use coreward_model::tuple::Protocol;
use nix::sys::socket::{getsockopt, sockopt};

use crate::facts::Sockets;

pub(super) fn gather_sockets(service: &ServiceAddress) -> Result<Sockets, String> {
    gather(service).map_err(|error| format!("{error:#}"))
}

fn gather(service: &ServiceAddress) -> anyhow::Result<Sockets> {
    let inodes = match service.protocol {
        Protocol::Tcp => listeners::tcp_listener_inodes(service.socket)?,
        Protocol::Udp => listeners::udp_socket_inodes(service.socket)?,
    };
    // Like the agent: processes that wait by epoll, or else those that have the socket open.
    let mut found: BTreeMap<u64, Listener> =
        listeners::find_waiters(&inodes)?.into_iter().map(|listener| (listener.inode, listener)).collect();
    let others = inodes.iter().copied().filter(|inode| !found.contains_key(inode)).collect();
    found.extend(listeners::find_owners(&others)?.into_iter().map(|listener| (listener.inode, listener)));
    let has_reuseport = found.values().find_map(|listener| {
        let socket = listeners::duplicate_socket(listener).ok()?;
        getsockopt(&socket.as_fd(), sockopt::ReusePort).ok()
    });
    let worker_cpus = found.into_values().map(|listener| listener.cpu_affinity).collect();
    Ok(Sockets { count: inodes.len(), has_reuseport, worker_cpus })
}
