//! The servers to which this server may forward packets of unknown connections (bpf/server/server.bpf.c, section 8).
//! The controller sends their list. ARP or neighbour discovery resolves their MAC addresses.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::mpsc::Receiver;

use anyhow::Context as _;
use coreward_dataplane::mac::MacAddress;
use coreward_dataplane::neighbour::{NeighbourMacChange, NeighbourResolver};
use coreward_dataplane::server::ServerPrograms;
use coreward_model::ServerId;
use coreward_wire::PreviousServer;

#[derive(Debug)]
pub struct DaisyChainNeighbours {
    interface: String,
    /// Resolver of the servers' MAC addresses, and the channel for its results. `None` until there is a server.
    resolver_and_change_receiver: Option<(NeighbourResolver, Receiver<NeighbourMacChange>)>,
    server_ids_by_address: BTreeMap<IpAddr, Vec<ServerId>>,
    mac_addresses: HashMap<IpAddr, MacAddress>,
}

impl DaisyChainNeighbours {
    /// Returns an empty daisy chain, which will resolve the MAC addresses of its servers on the device `interface`.
    pub fn new(interface: &str) -> Self {
        Self {
            interface: interface.to_owned(),
            resolver_and_change_receiver: None,
            server_ids_by_address: BTreeMap::new(),
            mac_addresses: HashMap::new(),
        }
    }

    /// Sets the servers to which packets of unknown connections may be forwarded. MAC addresses that an earlier process
    /// found remain until ARP finds others. Fails if the process may not open packet sockets.
    pub fn set_previous_servers(
        &mut self,
        servers: &[PreviousServer],
        bpf_programs: &mut ServerPrograms,
    ) -> anyhow::Result<()> {
        self.server_ids_by_address.clear();
        for server in servers {
            self.server_ids_by_address.entry(server.address).or_default().push(server.id);
        }
        self.mac_addresses.retain(|address, _| self.server_ids_by_address.contains_key(address));
        let needed_server_ids: BTreeSet<ServerId> = self.server_ids_by_address.values().flatten().copied().collect();
        let all_server_ids = (0..ServerId::COUNT as u64).filter_map(|id| ServerId::try_from(id).ok());
        all_server_ids
            .filter(|id| !needed_server_ids.contains(id))
            .for_each(|id| bpf_programs.set_other_server_mac(id, None));
        for (address, mac) in &self.mac_addresses {
            self.server_ids_by_address[address]
                .iter()
                .for_each(|id| bpf_programs.set_other_server_mac(*id, Some(*mac)));
        }
        if self.resolver_and_change_receiver.is_none() && !self.server_ids_by_address.is_empty() {
            self.resolver_and_change_receiver = Some(
                NeighbourResolver::start(&self.interface).context("cannot resolve MAC addresses of other servers")?,
            );
        }
        if let Some((resolver, _)) = &self.resolver_and_change_receiver {
            resolver.set_addresses(self.server_ids_by_address.keys().copied().collect());
        }
        Ok(())
    }

    /// Copies newly resolved MAC addresses into the BPF maps.
    pub fn apply_mac_address_changes(&mut self, bpf_programs: &mut ServerPrograms) {
        let Some((_, mac_changes)) = &self.resolver_and_change_receiver else { return };
        for NeighbourMacChange { address, mac } in mac_changes.try_iter() {
            let Some(server_ids) = self.server_ids_by_address.get(&address) else { continue };
            server_ids.iter().for_each(|id| bpf_programs.set_other_server_mac(*id, mac));
            match mac {
                Some(mac) => self.mac_addresses.insert(address, mac),
                None => self.mac_addresses.remove(&address),
            };
        }
    }

    /// Returns a warning for `coreward status` about the servers whose MAC addresses are unknown.
    pub fn unresolved_servers_warning(&self) -> Option<String> {
        let missing_addresses =
            self.server_ids_by_address.keys().filter(|address| !self.mac_addresses.contains_key(address));
        let missing_addresses: Vec<String> = missing_addresses.map(IpAddr::to_string).collect();
        (!missing_addresses.is_empty()).then(|| {
            format!(
                "no MAC address of {}: packets of older connections there are not forwarded",
                missing_addresses.join(", ")
            )
        })
    }
}
