//! Options of a fleet.

use std::collections::BTreeMap;
use std::path::PathBuf;

use coreward_model::consistency::{Consistency, Timestamps};
use coreward_model::forwarding::Forwarding;

use super::names::{controller_address_in, rack_listen_address};
use crate::addresses::Family;
use crate::preload::Preload;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FleetOptions {
    /// Policy of every service.
    pub policy: String,
    /// Consistency of every service.
    pub consistency: Consistency,
    /// Stamper of the cookies of every service.
    pub timestamps: Timestamps,
    /// Forwarding of the services.
    pub forwarding: Forwarding,
    /// Family of the servers' addresses in the fleet's file; IPv6 needs a testbed of that family, or routed servers.
    pub servers_family: Family,
    /// Time between two reports.
    pub report_interval_ms: u32,
    /// Make tables once per report interval, as in the simulator, instead of at each report.
    pub tables_by_interval: bool,
    /// Agents' source of the load of a server's cores.
    pub load: LoadSource,
    /// Whether agents steer connections to the workers of their cores.
    pub steer: bool,
    /// Run agents on servers; without them nothing reports, and only load balancers can stamp.
    pub agents: bool,
    /// Added text of the fleet's file: more services, for one.
    pub fleet_text: String,
    /// Added text of load balancers' files.
    pub load_balancer_text: String,
    /// Added text of every agent's file.
    pub agent_text: String,
    pub json_logs: bool,
    /// Run daemons with the rights of their systemd units only.
    pub confined: bool,
    /// Text of the controller's file in place of a store of its own and the fleet's file.
    pub shared_store: Option<String>,
    /// Addresses of other controllers, for the files of agents and load balancers.
    pub other_controllers: Vec<String>,
    /// The fleet's document, applied by `coreward apply`; `None`: it is a file of the controller's, which
    /// [`Fleet::set_pool`] writes.
    pub applied: Option<String>,
    /// Directory of the controller's records; `None`: in the testbed's directory.
    pub store: Option<PathBuf>,
    /// Family of the first controller's address and of load balancers' for each other; IPv6 needs a testbed of that
    /// family.
    pub control_family: Family,
    /// Number of controllers. Several keep their records in etcd, and the document is `applied`.
    pub controllers: u16,
    /// Addresses of etcd's members, for several controllers.
    pub etcd: Vec<String>,
    /// Lease of the controller that leads, in etcd (s). It is lost when the machine stalls for that long.
    pub lease_s: u32,
    /// By which every daemon has a wall clock of its own, and a disk that can be full for it alone; `None`: they have
    /// the machine's.
    pub preload: Option<Preload>,
    /// By server: the testbed's racks that its agent uses, in order, before the controllers. Every rack of the testbed
    /// has its daemon.
    pub server_racks: BTreeMap<u16, Vec<u16>>,
    /// By server: further lines in the fleet's file.
    pub server_lines: BTreeMap<u16, String>,
    /// Whether all parts have certificates of an authority of the testbed's own; otherwise they talk in plain.
    pub tls: bool,
}

impl Default for FleetOptions {
    fn default() -> Self {
        Self {
            policy: "crossrss".to_owned(),
            consistency: Consistency::default(),
            timestamps: Timestamps::default(),
            forwarding: Forwarding::default(),
            servers_family: Family::Ipv4,
            report_interval_ms: 100,
            tables_by_interval: false,
            load: LoadSource::Cpu,
            steer: true,
            agents: true,
            fleet_text: String::new(),
            load_balancer_text: String::new(),
            agent_text: String::new(),
            json_logs: false,
            confined: false,
            shared_store: None,
            other_controllers: Vec::new(),
            applied: None,
            store: None,
            control_family: Family::Ipv4,
            controllers: 1,
            etcd: Vec::new(),
            lease_s: 2,
            preload: None,
            server_racks: BTreeMap::new(),
            server_lines: BTreeMap::new(),
            tls: false,
        }
    }
}

impl FleetOptions {
    /// Controllers in the files of load balancers and racks.
    pub(super) fn controllers(&self) -> String {
        format!("{:?}", self.controller_addresses())
    }

    pub(super) fn controllers_of_agent(&self, server: u16) -> String {
        let racks = self.server_racks.get(&server).into_iter().flatten().map(|rack| rack_listen_address(*rack));
        let all: Vec<String> = racks.chain(self.controller_addresses()).collect();
        format!("{all:?}")
    }

    fn controller_addresses(&self) -> Vec<String> {
        let own = (1..=self.controllers).map(|number| controller_address_in(self.control_family, number));
        own.chain(self.other_controllers.iter().cloned()).collect()
    }
}

/// An agent's source of the load of the cores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadSource {
    /// Busy time of the machine's CPUs.
    Cpu,
    /// The core load file of the paced server ([`busy_file`]): the emulated cores.
    PacedServer,
}

/// State of a server in the controller's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdminState {
    /// Takes new connections.
    Active,
    /// Keeps what it has.
    Draining,
}
