//! Options with which the daemons of a fleet are configured.

use std::collections::BTreeMap;
use std::path::PathBuf;

use coreward_model::consistency::{ConsistencyMode, CookieStamper};
use coreward_model::forwarding::ForwardingMode;

use super::names::{controller_address_in_family, rack_controller_listen_address};
use crate::addresses::AddressFamily;
use crate::preloaded_faults::PreloadedFaults;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TestbedFleetOptions {
    /// Name of the load-balancing policy that all services use.
    pub policy_name: String,
    /// Connection consistency mode of every service.
    pub consistency: ConsistencyMode,
    /// Component that writes cookies into the TCP timestamps of every service's packets.
    pub timestamps: CookieStamper,
    /// Method by which load balancers forward packets to the servers, for every service.
    pub forwarding: ForwardingMode,
    /// Address family of the servers in the fleet's file. IPv6 needs an IPv6 testbed or routed servers.
    pub server_address_family: AddressFamily,
    /// Interval between the reports of agents (ms).
    pub report_interval_ms: u32,
    /// Whether the controller makes tables once per report interval, as in the simulator, instead of after each report.
    pub makes_tables_per_interval: bool,
    /// Source from which agents read the load of their server's cores.
    pub core_load_source: CoreLoadSource,
    /// Whether agents steer each connection to the worker on the core that receives its packets.
    pub steers_connections: bool,
    /// Whether servers run agents. Without agents, only load balancers can write cookies into packets.
    pub runs_agents: bool,
    /// Additional text at the end of the fleet document, such as further services.
    pub extra_fleet_text: String,
    /// Additional text in the configuration file of every load balancer.
    pub extra_load_balancer_text: String,
    /// Additional text in the configuration file of every agent.
    pub extra_agent_text: String,
    pub uses_json_logs: bool,
    /// Whether daemons have only the capabilities of their systemd units.
    pub has_only_unit_capabilities: bool,
    /// Text in the controller's file that replaces the lines for the store and the fleet document.
    pub shared_store_config: Option<String>,
    /// Addresses of controllers outside the testbed, to be listed in the files of agents and load balancers.
    pub external_controller_addresses: Vec<String>,
    /// Fleet document that `coreward apply` applies. If `None`, the controller reads the fleet document from a file,
    /// which [`Fleet::set_server_pool`](super::Fleet::set_server_pool) writes.
    pub applied_document: Option<String>,
    /// Path of the controller's store, or `None` for controller.redb in the testbed's directory.
    pub store_file: Option<PathBuf>,
    /// Address family of the first controller, and of the traffic between load balancers. IPv6 needs an IPv6 testbed.
    pub control_address_family: AddressFamily,
    /// Number of controllers. Several controllers store their records in etcd and need `applied_document`.
    pub controller_count: u16,
    /// Addresses of the etcd cluster's members, or an empty list with one controller.
    pub etcd_endpoints: Vec<String>,
    /// Duration of the leading controller's lease in etcd (s). If the machine stalls for this time, the leader loses
    /// its lease.
    pub leader_lease_s: u32,
    /// Faults of each daemon's wall clock and disk, or `None` if daemons use the machine's own clock and disks.
    pub preloaded_faults: Option<PreloadedFaults>,
    /// Numbers of the rack controllers that each server's agent tries before the controllers, in this order. The key is
    /// the server's number. Every rack controller in the testbed has a daemon.
    pub rack_numbers_by_server: BTreeMap<u16, Vec<u16>>,
    /// Additional lines for each server in the fleet document, by server number.
    pub extra_text_by_server: BTreeMap<u16, String>,
    /// Whether all daemons use TLS, with certificates from the testbed's authority.
    pub uses_tls: bool,
}

impl Default for TestbedFleetOptions {
    fn default() -> Self {
        Self {
            policy_name: "crossrss".to_owned(),
            consistency: ConsistencyMode::default(),
            timestamps: CookieStamper::default(),
            forwarding: ForwardingMode::default(),
            server_address_family: AddressFamily::Ipv4,
            report_interval_ms: 100,
            makes_tables_per_interval: false,
            core_load_source: CoreLoadSource::Cpu,
            steers_connections: true,
            runs_agents: true,
            extra_fleet_text: String::new(),
            extra_load_balancer_text: String::new(),
            extra_agent_text: String::new(),
            uses_json_logs: false,
            has_only_unit_capabilities: false,
            shared_store_config: None,
            external_controller_addresses: Vec::new(),
            applied_document: None,
            store_file: None,
            control_address_family: AddressFamily::Ipv4,
            controller_count: 1,
            etcd_endpoints: Vec::new(),
            leader_lease_s: 2,
            preloaded_faults: None,
            rack_numbers_by_server: BTreeMap::new(),
            extra_text_by_server: BTreeMap::new(),
            uses_tls: false,
        }
    }
}

impl TestbedFleetOptions {
    /// Returns the list of the controllers' addresses, formatted for the files of load balancers and rack controllers.
    pub(super) fn format_controller_list(&self) -> String {
        format!("{:?}", self.controller_addresses())
    }

    pub(super) fn format_agent_controller_list(&self, server: u16) -> String {
        let rack_addresses = self
            .rack_numbers_by_server
            .get(&server)
            .into_iter()
            .flatten()
            .map(|rack| rack_controller_listen_address(*rack));
        let all_addresses: Vec<String> = rack_addresses.chain(self.controller_addresses()).collect();
        format!("{all_addresses:?}")
    }

    fn controller_addresses(&self) -> Vec<String> {
        let testbed_addresses =
            (1..=self.controller_count).map(|number| controller_address_in_family(self.control_address_family, number));
        testbed_addresses.chain(self.external_controller_addresses.iter().cloned()).collect()
    }
}

/// Source from which an agent reads the load of its server's cores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CoreLoadSource {
    /// Busy times of the machine's real CPUs.
    Cpu,
    /// Core load file of the paced server ([`core_load_file_path`](super::core_load_file_path)), for emulated cores.
    PacedServer,
}

/// Administrative state of a server in the controller's configuration file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerAdminState {
    /// State of a server that accepts new connections.
    Active,
    /// State of a server that keeps its open connections and gets no new ones.
    Draining,
}
