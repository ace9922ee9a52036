//! Checks that every packet of a connection reaches the server of its first packet, despite all changes. Many
//! connections run in virtual time through several load balancers, while servers, load balancers and keys change.
//!
//! The load balancers are real, each as a BPF program in test runs and as its reference model. Their updates of
//! servers, tables and keys are real, too. Clients ([`client`]), servers ([`server`]) and the controller
//! ([`controller`]) are modelled. Servers stamp and restore like `bpf/server/server.bpf.c`, and the controller's
//! updates arrive at different times. The modelled network loses answers. It selects a load balancer by the
//! connection's hash, but sometimes another one.
//!
//! For connections with timestamps, a server must accept only SYNs, bare resets (without timestamps) and packets of its
//! own connections. One server must accept all packets of a connection. A packet may be dropped or broadcast, and then
//! the client sends it again. A SYN that is sent twice may reach two servers, of which the client answers one. The
//! report counts such SYNs. Connections without timestamps have no such guarantee when the pool changes, so the report
//! counts those that break.

mod client;
mod controller;
mod report;
mod server;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashSet};
use std::net::Ipv4Addr;

use coreward_intf as intf;
use coreward_model::consistency::{ConsistencyMode, ServiceSettings};
use coreward_model::forwarding::ForwardingMode;
use coreward_model::lb::MacAddress;

use crate::fuzz_rng::FuzzRng;
use crate::harness::FuzzHarness;
use crate::ipv6_translation;
use client::ClientConnection;
use controller::DesiredFleetState;
pub use report::ConsistencyCheckReport;
use server::SimulatedServer;

/// Maximum time between two packets of a connection (ms).
pub const MAX_CONNECTION_IDLE_MS: u64 = 60_000;

#[derive(Debug, Clone, Copy)]
pub struct ConsistencyCheckConfig {
    /// Number of connections, which are opened at a constant rate.
    pub connection_count: u32,
    /// Virtual time during which connections are opened (minutes).
    pub arrival_minutes: u32,
    /// Number of changes per minute of virtual time. A change lets a server or load balancer join or leave, or alters
    /// health, addresses or tables.
    pub changes_per_minute: u32,
    /// Interval between new cookie keys (ms). It must exceed a connection's longest idle time
    /// ([`MAX_CONNECTION_IDLE_MS`]), because otherwise another key would decode the connection's cookie.
    pub key_rotation_interval_ms: u64,
    pub load_balancer_count: usize,
    /// Consistency mode of the service: stateless or stateful.
    pub consistency: ConsistencyMode,
    pub forwarding: ForwardingMode,
    pub has_ipv6_vip: bool,
    pub seed: u64,
    /// Whether the BPF programs run and are compared with their reference models.
    pub runs_bpf_program: bool,
}

impl Default for ConsistencyCheckConfig {
    fn default() -> Self {
        Self {
            connection_count: 1_000_000,
            arrival_minutes: 10,
            changes_per_minute: 80,
            key_rotation_interval_ms: 2 * MAX_CONNECTION_IDLE_MS,
            load_balancer_count: 2,
            consistency: ConsistencyMode::Stateless,
            forwarding: ForwardingMode::L2,
            has_ipv6_vip: false,
            seed: 1,
            runs_bpf_program: true,
        }
    }
}

impl ConsistencyCheckConfig {
    /// Returns the VIP and port of the only service. An IPv4 placeholder represents an IPv6 VIP.
    fn service_address(&self) -> (Ipv4Addr, u16) {
        (if self.has_ipv6_vip { ipv6_translation::IPV6_VIP_PLACEHOLDERS[0] } else { Ipv4Addr::new(10, 200, 0, 1) }, 80)
    }

    fn service_settings(&self) -> ServiceSettings {
        ServiceSettings { consistency: self.consistency, forwarding: self.forwarding, ..ServiceSettings::default() }
    }
}

/// Event that happens at a scheduled time of the simulation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum ConsistencyCheckEvent {
    OpenConnection,
    /// The connection with this index sends its next packet.
    SendPacket(u32),
    /// A random change of the fleet happens.
    ChangeFleet,
    /// A load balancer (first index) receives the state of a server (second index).
    LbReceivesServerUpdate(usize, usize),
    /// The load balancer with this index receives the newest table.
    LbReceivesTable(usize),
    /// The load balancer with this index receives the newest keys.
    LbReceivesKeys(usize),
    ServerReceivesKeys(usize),
    /// A new key replaces the unused key and is distributed.
    DistributeNewKey,
    /// The newest key, which all servers and load balancers have received, becomes the current one.
    SwitchKey,
    /// The load balancer with this index starts again, with empty tables.
    RestartLoadBalancer(usize),
    /// A load balancer (first index) is informed whether another one (second index) is alive.
    LbReceivesOwnerUpdate(usize, usize),
    /// The load balancer with this index frees the entries of connections that have ended.
    FreeEndedConnections(usize),
}

struct SimulatedLoadBalancer {
    harness: FuzzHarness,
    service_slot: usize,
    is_running: bool,
}

struct ConsistencyCheck {
    config: ConsistencyCheckConfig,
    rng: FuzzRng,
    /// Current virtual time (ms).
    now_ms: u64,
    scheduled_events: BinaryHeap<Reverse<(u64, u64, ConsistencyCheckEvent)>>,
    scheduled_event_count: u64,
    desired_state: DesiredFleetState,
    servers: Vec<SimulatedServer>,
    load_balancers: Vec<SimulatedLoadBalancer>,
    connections: Vec<Option<ClientConnection>>,
    opened_connection_count: u32,
    /// Addresses and ports of the clients with open connections.
    clients_with_open_connections: HashSet<(Ipv4Addr, u16)>,
    /// Addresses and ports of clients whose connections have ended. Some of them are used again.
    clients_with_ended_connections: Vec<(Ipv4Addr, u16)>,
    report: ConsistencyCheckReport,
}

fn load_balancer_mac(lb_index: usize) -> MacAddress {
    [2, 0, 0, 0, 0, lb_index as u8]
}

/// Runs a simulation of connections during changes of the fleet. Fails when a BPF program and its reference model
/// differ, or the kernel rejects an update.
pub fn simulate_and_check_consistency(config: ConsistencyCheckConfig) -> anyhow::Result<ConsistencyCheckReport> {
    let mut simulation = ConsistencyCheck::new(config)?;
    while let Some(Reverse((time_ms, _, event))) = simulation.scheduled_events.pop() {
        simulation.now_ms = time_ms;
        simulation.apply_event(event)?;
    }
    Ok(simulation.report)
}

impl ConsistencyCheck {
    fn schedule_event(&mut self, delay_ms: u64, event: ConsistencyCheckEvent) {
        self.scheduled_event_count += 1;
        self.scheduled_events.push(Reverse((self.now_ms + delay_ms, self.scheduled_event_count, event)));
    }

    fn arrivals_end_ms(&self) -> u64 {
        u64::from(self.config.arrival_minutes) * 60_000
    }

    fn apply_event(&mut self, event: ConsistencyCheckEvent) -> anyhow::Result<()> {
        match event {
            ConsistencyCheckEvent::OpenConnection => self.start_next_connection(),
            ConsistencyCheckEvent::SendPacket(connection_index) => self.send_next_packet(connection_index),
            ConsistencyCheckEvent::ChangeFleet => self.apply_random_change(),
            ConsistencyCheckEvent::LbReceivesServerUpdate(lb_index, server_index) => {
                self.deliver_server_update_to_lb(lb_index, server_index)
            }
            ConsistencyCheckEvent::LbReceivesTable(lb_index) => self.deliver_table_to_lb(lb_index),
            ConsistencyCheckEvent::LbReceivesKeys(lb_index) => self.deliver_keys_to_lb(lb_index),
            ConsistencyCheckEvent::ServerReceivesKeys(server_index) => {
                self.servers[server_index].replace_cookie_keys(self.desired_state.cookie_keys, self.now_ms);
                Ok(())
            }
            ConsistencyCheckEvent::DistributeNewKey => self.distribute_new_key(),
            ConsistencyCheckEvent::SwitchKey => self.switch_cookie_key(),
            ConsistencyCheckEvent::RestartLoadBalancer(lb_index) => self.restart_load_balancer(lb_index),
            ConsistencyCheckEvent::LbReceivesOwnerUpdate(lb_index, owner_index) => {
                self.deliver_owner_update_to_lb(lb_index, owner_index)
            }
            ConsistencyCheckEvent::FreeEndedConnections(lb_index) => self.free_ended_connections(lb_index),
        }
    }

    /// Processes a frame in load balancer `lb_index`. Returns the counter of the frame's outcome, and the frame that
    /// the load balancer sends.
    fn process_frame(&mut self, lb_index: usize, frame: &[u8]) -> anyhow::Result<(intf::lb_counter, Vec<u8>)> {
        let harness = &mut self.load_balancers[lb_index].harness;
        let (outcome, difference) = harness.process_packet(frame)?;
        if let Some(difference) = difference {
            anyhow::bail!("load balancer {lb_index}, BPF program and reference model differ in {difference}");
        }
        self.report.packets_by_outcome[outcome.counter as usize] += 1;
        Ok((outcome.counter, harness.last_model_frame().to_vec()))
    }
}
